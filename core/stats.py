"""What an engine is doing and has done: the figures behind `/metrics`."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0, 320.0,
)  # fmt: skip
"""Upper ends of the buckets of `Durations`, in seconds; a last bucket has none."""


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When a request had got how far, in seconds of the engine's monotonic clock."""

    arrived: float
    admitted: float
    """Scheduled for the first time; what is before is the queue."""
    first_token: float
    finished: float


class Durations(msgspec.Struct, array_like=True):
    """A histogram; a bucket holds what is at most its bound."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += count
        self.sum_s += seconds * count


class Stats(msgspec.Struct, kw_only=True):
    """Sums are since the engine's start."""

    num_running: int = 0
    """Sequences: the size of the batch."""
    num_waiting: int = 0
    num_held_blocks: int = 0
    num_filled_tokens: int = 0
    """Slots of held blocks that hold K and V of a token; the others are reserved, or a rest."""

    num_steps: int = 0
    num_step_sequences: int = 0
    """Over steps, the mean size of a batch."""
    num_step_tokens: int = 0
    num_prompt_tokens: int = 0
    """Of requests that have had their first token."""
    num_generated_tokens: int = 0
    num_prefix_queries: int = 0
    """Tokens looked for in the prefix cache."""
    num_prefix_hits: int = 0
    """Of those, the ones that were there."""
    num_swaps: int = 0
    """Preemptions whose blocks went to the host."""
    num_recomputes: int = 0
    """Preemptions whose tokens are computed again."""
    finished: dict[str, int] = {}
    """Answers, by the reason why they ended."""

    first_token: Durations = msgspec.field(default_factory=Durations)
    """From arrival."""
    inter_token: Durations = msgspec.field(default_factory=Durations)
    queue: Durations = msgspec.field(default_factory=Durations)
    prefill: Durations = msgspec.field(default_factory=Durations)
    """From admission to the first token."""
    decode: Durations = msgspec.field(default_factory=Durations)
    """From the first token to the end."""
    whole: Durations = msgspec.field(default_factory=Durations)
    """From arrival to the end."""
