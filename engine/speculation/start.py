"""Adds speculation to an engine."""

from __future__ import annotations

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


class Speculative(Feature):
    """Requests use it without asking for it."""

    def __init__(
        self,
        options: SpeculationOptions,
        strategy: Strategy,
        sampler: Sampler,
        draft_model: DraftModel | None = None,
    ) -> None:
        """Let a strategy add drafts to its steps. sampler: as in `DraftColumn`.

        draft_model: for the method of this name.
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
        self._always = options.speculation == "always"
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

        The costs are measured, unless an earlier start has done so. executor: has `column`, and
        computed nothing that anybody needs. key: names all that the costs depend on.
        """
        what = self._method
        if self._draft_model is not None:
            what += f" {self._draft_model.description}"
        if self._always:
            return f"speculation: {what}, always {self._num_drafts} tokens"
        name = key()
        costs, when = _saved(name), f" (measured at an earlier start, {path_of(name)})"
        is_new = costs is None
        if costs is None:
            costs, when = self._measured(executor, max_model_len, vocab_size), ""
        self._speculation.policy = Policy(costs)
        note = f"speculation: {what}, up to {self._num_drafts} tokens; {self._numbers(costs)}"
        if is_new:
            write(name, Measured(str(model_dir), note, msgspec.Raw(msgspec.json.encode(costs))))
        return note + when

    def _numbers(self, costs: StepCosts) -> str:
        rows = min(1 + self._num_drafts, len(costs.drafted) - 1)
        lines = _break_evens(costs, self._strategy.limits.max_sequences, self._num_drafts)
        draft = costs.proposing(1, 1)
        return (
            f"a step of 1 row takes {1000 * costs.plain[1]:.2f} ms, of {rows} rows "
            f"{1000 * costs.drafted[rows]:.2f} ms{f', a draft {1000 * draft:.2f} ms' * bool(draft)}"
            f"; it pays from this share of right tokens on: {', '.join(lines)}"
        )

    def _measured(self, executor: Executor, max_model_len: int, vocab_size: int) -> StepCosts:
        memory, limits = self._strategy.memory, self._strategy.limits
        timer = StepTimer(
            executor, memory.layout.groups, memory.num_blocks, vocab_size, self._num_drafts
        )
        ahead = memory.states.num_ahead
        most = limits.max_sequences * self._num_drafts if ahead is None else ahead
        costs = measure_costs(timer, limits, self._num_drafts, max_model_len, most)
        if self._draft_model is None:
            return costs
        return self._with_passes(costs, self._draft_model, vocab_size)

    def _with_passes(self, costs: StepCosts, draft: DraftModel, vocab_size: int) -> StepCosts:
        """Return the costs with those of the draft model's passes."""
        memory = draft.memory
        timer = StepTimer(draft.executor, memory.layout.groups, memory.num_blocks, vocab_size, 0)
        return measure_passes(timer, costs, min(costs.context, draft.longest))

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
