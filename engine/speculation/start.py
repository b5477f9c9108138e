"""Adds speculation to an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from core.configuration.options import SpeculationOptions, SpeculativeConfig, SpeculativeMethod
from core.errors import ConfigurationError
from core.part import Feature
from core.process.measured import Measured, path_of, read, write
from core.protocol.stats import Total
from engine.executor import Executor
from engine.sampling.sampler import Sampler
from engine.speculation.column import DraftColumn
from engine.speculation.draft_model import DraftModel
from engine.speculation.measure import StepTimer, measure_costs, measure_passes
from strategies.base import Strategy
from strategies.speculation.costs import StepCosts
from strategies.speculation.policy import Policy
from strategies.speculation.proposer import Proposer
from strategies.speculation.speculation import Speculation

SHOWN = (1, 4, 16, 64)
"""Numbers of sequences for which a note says when drafts pay."""
SHOWN_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
"""Numbers of rows for which `explain` shows what steps cost."""


class Speculative(Feature):
    """Requests use it without asking for it."""

    def __init__(
        self,
        options: SpeculationOptions,
        strategy: Strategy,
        sampler: Sampler,
        draft_model: DraftModel | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        """Let a strategy add drafts to its steps. sampler: as in `DraftColumn`.

        draft_model: for the method of this name. overlaps: as in `Engine`.
        """
        method, self._num_drafts = options.chosen
        assert method is not None, "speculation is on"
        ahead = strategy.memory.states.num_ahead
        if ahead is not None:
            self._num_drafts = min(self._num_drafts, ahead)
        if not self._num_drafts:
            raise ConfigurationError(
                "option.speculative_method: there is no memory for a second state, from which a "
                "sequence goes on if its draft was wrong; raise option.kv_cache_memory_bytes or "
                "option.gpu_memory_utilization, or leave the option out"
            )
        self._method: SpeculativeMethod = method
        ignored = ", ".join(options.config.without_effect)
        self.notes = (f"option.speculative_config: {ignored} has no effect",) * bool(ignored)
        self._mode = options.speculation
        self._overlaps = overlaps
        self._strategy = strategy
        self._draft_model = draft_model
        self._speculation = Speculation(
            strategy.memory,
            strategy.limits,
            draft_model or _make_proposer(method, options.config),
            self._num_drafts,
        )
        strategy.extension = self._speculation
        self.column = DraftColumn(sampler)

    def measure(
        self,
        executor: Executor,
        max_model_len: int,
        vocab_size: int,
        model_dir: Path,
        key: Callable[[], str],
    ) -> str:
        """Find out what steps cost, so that only drafts that pay are verified. Return a note.

        The costs are measured, unless an earlier start has done so and the options do not ask for
        new ones. executor: has `column`, and computed nothing that anybody needs. key: names all
        that the costs depend on.
        """
        what = self._method
        if self._draft_model is not None:
            what += f" {self._draft_model.description}"
        if self._mode == "always":
            return f"speculation: {what}, always {self._num_drafts} tokens"
        name = key()
        saved = None if self._mode == "measure" else _saved(name)
        costs = saved or self.measured_costs(executor, max_model_len, vocab_size)
        self._speculation.policy = Policy(costs, time.perf_counter)
        note = f"speculation: {what}, up to {self._num_drafts} tokens; {self._numbers(costs)}"
        if saved is not None:
            return f"{note} (measured at an earlier start, {path_of(name)})"
        values = msgspec.Raw(msgspec.json.encode(costs))
        write(name, Measured(str(model_dir), note, values, _table(costs)))
        return note

    def _numbers(self, costs: StepCosts) -> str:
        rows = min(1 + self._num_drafts, len(costs.drafted) - 1)
        lines = _break_evens(costs, self._strategy.limits.max_sequences, self._num_drafts)
        draft = costs.proposing(1, 1)
        return (
            f"a step of 1 row takes {1000 * costs.plain[1]:.2f} ms, of {rows} rows "
            f"{1000 * costs.drafted[rows]:.2f} ms{f', a draft {1000 * draft:.2f} ms' * bool(draft)}"
            f"; it pays from this share of right tokens on: {', '.join(lines)}"
        )

    def measured_costs(
        self,
        executor: Executor,
        max_model_len: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> StepCosts:
        """Measure what steps cost. executor: as in `measure`."""
        memory, limits = self._strategy.memory, self._strategy.limits
        timer = StepTimer(
            executor, memory.layout.groups, memory.num_blocks, vocab_size, self._num_drafts, clock
        )
        ahead = memory.states.num_ahead
        most = limits.max_sequences * self._num_drafts if ahead is None else ahead
        costs = measure_costs(
            timer, limits, self._num_drafts, max_model_len, most, overlaps=self._overlaps
        )
        if self._draft_model is None:
            return costs
        draft, memory = self._draft_model, self._draft_model.memory
        timer = StepTimer(
            draft.executor, memory.layout.groups, memory.num_blocks, vocab_size, 0, clock
        )
        longest = min(costs.context, draft.longest)
        return measure_passes(timer, costs, longest, limits.max_step_tokens)

    def totals(self) -> tuple[Total, ...]:
        counts = self._speculation.counts
        by_position = counts.accepted[: self._num_drafts]
        return (
            Total(
                "vllm:spec_decode_num_drafts",
                "Times that proposed tokens of a sequence were verified.",
                {"": counts.num_drafts},
            ),
            Total(
                "vllm:spec_decode_num_draft_tokens",
                "Proposed tokens that were verified.",
                {"": counts.num_draft_tokens},
            ),
            Total(
                "vllm:spec_decode_num_accepted_tokens",
                "Proposed tokens that were right.",
                {"": counts.num_accepted},
            ),
            Total(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Proposed tokens that were right, by their position after the newest token.",
                {str(position): count for position, count in enumerate(by_position)},
                "position",
            ),
            Total(
                "longshore:spec_decode_decodes",
                "Times that a sequence decoded, with proposed tokens or without.",
                {"": counts.num_decodes},
            ),
            Total(
                "longshore:spec_decode_steps",
                "Steps with decodes: drafted, or why no proposed tokens were verified.",
                {**counts.steps},
                "decision",
            ),
        )


def _saved(key: str) -> StepCosts | None:
    """Return the costs that an earlier start has measured, if they are in today's form."""
    found = read(key)
    if found is None:
        return None
    try:
        return msgspec.json.decode(found.values, type=StepCosts)
    except msgspec.DecodeError:
        return None


def _table(costs: StepCosts) -> tuple[str, ...]:
    """Return the costs of steps in rows of text."""
    longest = max(len(costs.plain), len(costs.drafted)) - 1
    counts = [count for count in SHOWN_ROWS if count <= longest]
    rows = {"rows in a step": [str(count) for count in counts]}
    kinds = {"ms without drafts": costs.plain, "ms with drafts": costs.drafted}
    for name, table in kinds.items():
        rows[name] = [f"{1000 * table[n]:.2f}" if n < len(table) else "" for n in counts]
    return tuple(
        f"{name:<17}{''.join(f'{text:>8}' for text in texts)}".rstrip()
        for name, texts in rows.items()
    )


def _break_evens(costs: StepCosts, max_sequences: int, num_drafts: int) -> Iterator[str]:
    for number in dict.fromkeys(min(number, max_sequences) for number in SHOWN):
        share = costs.break_even(number, num_drafts)
        yield f"{number} sequence{'s'[: number > 1]} {'never' if share is None else share}"


def _make_proposer(method: SpeculativeMethod, config: SpeculativeConfig) -> Proposer:
    """Return what looks for drafts in text."""
    if method == "ngram":
        from strategies.speculation.ngram import NgramProposer

        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    from strategies.speculation.suffix import SuffixProposer

    return SuffixProposer(config.suffix_decoding_max_spec_factor)
