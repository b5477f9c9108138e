"""KV cache use of a strategy, run with an executor that computes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.beams import Candidates, num_candidates
from core.configuration.kv_layout import KVLayout
from core.plan import Chunk, StepPlan, StepResult
from core.request import Request
from core.sampling import Sampled
from strategies.base import Limits, Strategy
from strategies.factory import StrategySettings, make_strategy

VOCABULARY = 50_000


@dataclass(slots=True)
class Usage:
    """Sums over the steps that `measure` counts, in token slots unless noted otherwise."""

    written: int = 0
    """Slots with computed K/V; shared slots count once."""
    reserved: int = 0
    """Slots of held blocks."""
    referenced_blocks: int = 0
    """Entries of all block tables; a shared block counts once per table."""
    held_blocks: int = 0
    available: int = 0
    """All slots of the KV cache."""
    num_running: int = 0
    num_steps: int = 0
    computed_tokens: int = 0
    """Tokens computed in all steps, counted or not."""

    @property
    def used(self) -> float:
        return self.written / max(1, self.reserved)

    @property
    def used_of_all(self) -> float:
        return self.written / max(1, self.available)

    @property
    def shared(self) -> float:
        """Blocks saved by sharing, as a share of the blocks needed without it (paper, 6.3)."""
        return 1 - self.held_blocks / max(1, self.referenced_blocks)


def make(batching: str, num_tokens: int, max_length: int, **changes: object) -> Strategy:
    """Build a strategy with `num_tokens` slots in blocks of 16.

    changes: fields of StrategySettings that differ from the defaults here.
    """
    values: dict[str, object] = {
        "batching": batching,
        "num_blocks": num_tokens // 16,
        "layout": KVLayout.uniform(16),
        "max_model_len": max_length,
        "limits": Limits(max_sequences=256, max_step_tokens=2048),
        "max_delay_s": 0.0,
        "kv_reservation": "max",
        "enable_prefix_caching": False,
        "preemption_mode": "recompute",
        "num_swap_blocks": 0,
    }
    return make_strategy(StrategySettings(**(values | changes)))  # pyright: ignore[reportArgumentType]


def measure(strategy: Strategy, requests: Iterable[Request], seed: int = 0) -> Usage:
    """Run requests that all arrive at the start, and sum up the KV cache use of every step.

    If some requests have to wait at the start, only steps with waiting requests count, because only
    then could more memory be used. Use is recorded after scheduling and before the commit.
    """
    todo, usage, rng = list(requests), Usage(), random.Random(seed)
    for request in todo:
        strategy.add(request)
    is_crowded: bool | None = None
    while strategy.has_work():
        plan = strategy.schedule(0.0)
        assert plan is not None
        usage.computed_tokens += plan.num_tokens
        is_crowded = bool(strategy.waiting) if is_crowded is None else is_crowded
        if strategy.waiting or not is_crowded:
            _add(usage, strategy)
        strategy.commit(plan, _result(plan, rng))
    return usage


def _add(usage: Usage, strategy: Strategy) -> None:
    size = strategy.memory.block_size
    written: dict[int, int] = {}
    for group in strategy.running:
        for sequence in group.sequences:
            table = strategy.memory.held(sequence.id)
            usage.referenced_blocks += len(table)
            for index, block in enumerate(table):
                filled = max(0, min(size, sequence.num_computed_tokens - index * size))
                written[block] = max(written.get(block, 0), filled)
    usage.written += sum(written.values())
    usage.held_blocks += strategy.memory.num_held_blocks
    usage.reserved += strategy.memory.num_held_blocks * size
    usage.available += strategy.memory.num_slots
    usage.num_running += strategy.num_running
    usage.num_steps += 1


def _result(plan: StepPlan, rng: random.Random) -> StepResult:
    return {chunk.sequence.id: _sampled(chunk, rng) for chunk in plan.chunks if chunk.samples_token}


def _sampled(chunk: Chunk, rng: random.Random) -> Sampled | Candidates:
    """Return a random token or, for a beam, candidates with exponentially distributed scores."""
    params = chunk.sequence.params
    if not params.beam_width:
        return Sampled((rng.randrange(VOCABULARY),), (-1.0,))
    count = num_candidates(params, 0)
    scores = sorted(rng.expovariate(1.0) for _ in range(count))
    tokens: Sequence[int] = rng.sample(range(VOCABULARY), count)
    return Candidates(tuple(tokens), tuple(-score for score in scores))
