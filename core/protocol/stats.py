"""The engine's statistics: the numbers behind `/metrics`."""

from __future__ import annotations

from bisect import bisect_left
from typing import ClassVar

import msgspec

BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0, 320.0,
)  # fmt: skip
"""Upper bounds of the buckets of `Durations`, in seconds. A last bucket has no bound."""
BOUNDS_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
"""Upper bounds of the buckets of `Counts`: 1, 2, 5, 10, ... 500,000. A last bucket has no bound."""


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The times of one answer, in seconds of the engine's monotonic clock."""

    arrived: float
    admitted: float
    """When its request was first scheduled. Until then the request was queued."""
    first_token: float
    """When its request got the first token of any answer."""
    finished: float


class Receipt(msgspec.Struct, array_like=True):
    """What a request has cost. Times are integer nanoseconds."""

    compute_ns: int = 0
    """Its share of the time of all steps that computed its tokens (engine/observers/ledger.py)."""
    queued_ns: dict[str, int] = {}
    """How long none of its sequences ran, by reason. step: until the next step was scheduled.
    slots, blocks, batch, budget: as in `strategies.base.Strategy.blocked_by`, of the first waiting
    request. priority: behind requests of a more urgent priority."""
    kv_block_ns: int = 0
    """KV blocks that it held, each times how long."""
    kv_shared_block_ns: int = 0
    """Of them, blocks that it did not fill: of a cached prefix, or of its first sample."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Tokens in the blocks that it did not fill."""

    def add(self, other: Receipt) -> None:
        """Add another request's figures."""
        self.compute_ns += other.compute_ns
        for reason, queued_ns in other.queued_ns.items():
            self.queued_ns[reason] = self.queued_ns.get(reason, 0) + queued_ns
        self.kv_block_ns += other.kv_block_ns
        self.kv_shared_block_ns += other.kv_shared_block_ns
        self.num_preemptions += other.num_preemptions
        self.num_cached_tokens += other.num_cached_tokens


class Histogram(msgspec.Struct, array_like=True):
    """A histogram. Each bucket counts values up to its bound and above the previous bound."""

    bounds: ClassVar[tuple[float, ...]] = ()
    counts: list[int]
    sum: float = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


class Durations(Histogram, array_like=True):
    """A histogram of seconds."""

    bounds: ClassVar[tuple[float, ...]] = BOUNDS_S
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))


class Counts(Histogram, array_like=True):
    """A histogram of numbers, most of them of tokens."""

    bounds: ClassVar[tuple[float, ...]] = BOUNDS_TOKENS
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_TOKENS) + 1))


class Info(msgspec.Struct, frozen=True):
    """A gauge whose labels hold the information. Its value is the time at which it is read."""

    name: str
    doc: str
    labels: dict[str, str]


class Total(msgspec.Struct, frozen=True):
    """A counter since the start, or several with a label."""

    name: str
    doc: str
    values: dict[str, float]
    """By the label's value; by "" without a label."""
    label: str = ""


class Stats(msgspec.Struct, kw_only=True):
    """Statistics of an engine. Counters start at 0 when the engine starts."""

    num_running: int = 0
    """Running sequences: the batch size."""
    num_waiting: int = 0
    waiting: dict[str, int] = {}
    """Of them, by why the first one waits (`strategies.base.Blocked`); the others wait behind."""
    num_held_blocks: int = 0
    num_filled_tokens: int = 0
    """Token slots already written in held blocks. The other slots of these blocks are reserved, or
    are the unused ends of blocks."""

    num_steps: int = 0
    num_step_sequences: int = 0
    """Sequences summed over all steps. Divide by `num_steps` to get the mean batch size."""
    host_s: float = 0.0
    """Seconds in which the engine's loop neither ran the model nor waited, whether for the model or
    for a message."""
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that got their first token."""
    num_generated_tokens: int = 0
    num_prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0
    """Tokens found in the prefix cache."""
    num_swaps: int = 0
    """Preemptions by swapping blocks to the host."""
    num_recomputes: int = 0
    """Preemptions by recomputation."""
    finished: dict[str, int] = {}
    """Ended answers by vLLM's reasons: stop, length, abort, error."""
    aborted: dict[str, int] = {}
    """Requests that were aborted, by reason."""
    refused: dict[str, int] = {}
    """Requests that the front end refused, by reason."""
    infos: tuple[Info, ...] = ()
    """What the engine's features show of the requests."""
    totals: tuple[Total, ...] = ()
    """What the engine's features count."""

    first_token: Durations = msgspec.field(default_factory=Durations)
    """Time from arrival to the first token."""
    inter_token: Durations = msgspec.field(default_factory=Durations)
    queue: Durations = msgspec.field(default_factory=Durations)
    prefill: Durations = msgspec.field(default_factory=Durations)
    """Time from admission to the first token."""
    decode: Durations = msgspec.field(default_factory=Durations)
    """Time from the first token to the end."""
    inference: Durations = msgspec.field(default_factory=Durations)
    """Time from admission to the end."""
    end_to_end: Durations = msgspec.field(default_factory=Durations)
    """Time from arrival to the end."""
    per_output_token: Durations = msgspec.field(default_factory=Durations)
    """Mean time between two tokens of an answer, one value for each answer."""

    prompt_tokens: Counts = msgspec.field(default_factory=Counts)
    """Tokens of the prompt. This histogram and the next one get one value for each answer."""
    generation_tokens: Counts = msgspec.field(default_factory=Counts)
    max_generation_tokens: Counts = msgspec.field(default_factory=Counts)
    """Tokens of the longest answer. This histogram and the next two get one value per request."""
    params_n: Counts = msgspec.field(default_factory=Counts)
    params_max_tokens: Counts = msgspec.field(default_factory=Counts)
    iteration_tokens: Counts = msgspec.field(default_factory=Counts)
    """Tokens computed in a step."""
