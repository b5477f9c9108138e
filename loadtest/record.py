"""What became of one request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from loadtest.ask import Ask


class Timings(msgspec.Struct, frozen=True):
    """Seconds of the server's own clock, where it tells them; only differences mean anything."""

    arrived: float
    admitted: float
    first_token: float
    finished: float


class Record(msgspec.Struct, kw_only=True):
    """Times are seconds of the client's clock since the start of the measurement."""

    index: int
    kind: str = ""
    prompt_tokens: int
    """As the server counts them, else as they were asked for."""
    asked_tokens: int
    """Of all its answers, each to its very last."""
    due_s: float | None = None
    sent_s: float
    first_s: float | None = None
    """The arrival of the first bytes that hold a token."""
    finished_s: float
    output_tokens: int | None = None
    """As the server counts them; None: it did not say."""
    error: str | None = None
    """Why there is no whole answer; None once its terminal record was read."""
    stall_s: float | None = None
    """The longest wait between two arrivals of tokens."""
    timings: Timings | None = None

    @property
    def is_good(self) -> bool:
        return self.error is None

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.sent_s

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def queue_s(self) -> float | None:
        return None if self.timings is None else self.timings.admitted - self.timings.arrived


class Attempt:
    """A request under way: takes in what arrives, and makes a record of it."""

    def __init__(self, ask: Ask, sent_s: float) -> None:
        shape = ask.shape
        self._arrivals: defaultdict[int, list[float]] = defaultdict(list)
        """When bytes with tokens came, by the answer that they are of."""
        self._record = Record(
            index=ask.index,
            kind=shape.kind,
            prompt_tokens=shape.prompt,
            asked_tokens=shape.answer * shape.samples,
            due_s=ask.due_s,
            sent_s=sent_s,
            finished_s=sent_s,
            error="the answer ended without its terminal record",
        )

    @property
    def gaps_s(self) -> Sequence[float]:
        """Between two arrivals of tokens of one answer."""
        return [
            after - before for times in self._arrivals.values() for before, after in pairwise(times)
        ]

    def tokens(self, at_s: float, answer: int = 0) -> None:
        self._arrivals[answer].append(at_s)

    def counted(self, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """What the server says of sizes."""
        if prompt_tokens is not None:
            self._record.prompt_tokens = prompt_tokens
        if output_tokens is not None:
            self._record.output_tokens = output_tokens

    def timed(self, timings: Timings) -> None:
        self._record.timings = timings

    def ended(self) -> None:
        """The terminal record was read, and it tells of no failure."""
        self._record.error = None

    def record(self, now_s: float, error: str | None = None) -> Record:
        """error: what went wrong, if it did; it counts for more than a terminal record."""
        record = self._record
        record.finished_s = now_s
        record.error = error or record.error
        record.first_s = min((times[0] for times in self._arrivals.values()), default=None)
        record.stall_s = max(self.gaps_s, default=None)
        return record
