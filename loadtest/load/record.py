"""Outcome and timings of one request."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from loadtest.load.request import Request


class Timings(msgspec.Struct, frozen=True):
    """Timestamps of the server's clock in seconds, if it reports them; use only differences."""

    arrived: float
    admitted: float
    first_token: float
    finished: float


class Record(msgspec.Struct, kw_only=True):
    """Outcome of a request. Times are seconds of the client's clock since the run started."""

    index: int
    kind: str = ""
    prompt_tokens: int
    """As counted by the server, otherwise as requested."""
    asked_tokens: int
    """Output tokens requested, over all samples."""
    due_s: float | None = None
    sent_s: float
    first_s: float | None = None
    """Arrival of the first bytes that hold a token."""
    finished_s: float
    output_tokens: int | None = None
    """As counted by the server; None if it did not report a count."""
    error: str | None = None
    """Why the response is incomplete; None once its terminal record was read."""
    stall_s: float | None = None
    """Longest gap between two arrivals of tokens of one sample."""
    gap_s: float | None = None
    """Mean gap between two arrivals of tokens of one sample."""
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
    def itl_s(self) -> float | None:
        """The request's mean inter-token latency.

        It is 0 if all tokens came at once, and None if no token came in a stream.
        """
        return None if self.first_s is None else self.gap_s or 0.0

    @property
    def queue_s(self) -> float | None:
        return None if self.timings is None else self.timings.admitted - self.timings.arrived


class Attempt:
    """A request in flight: collects what arrives and turns it into a record."""

    def __init__(self, request: Request, sent_s: float) -> None:
        shape = request.shape
        self._arrivals: defaultdict[int, list[float]] = defaultdict(list)
        """Arrival times of tokens, by sample index."""
        self._record = Record(
            index=request.index,
            kind=shape.kind,
            prompt_tokens=shape.prompt_tokens,
            asked_tokens=shape.output_tokens * shape.samples,
            due_s=request.due_s,
            sent_s=sent_s,
            finished_s=sent_s,
            error="the response ended without its terminal record",
        )

    @property
    def gaps_s(self) -> Sequence[float]:
        """Gaps between two arrivals of tokens of one sample."""
        return [
            after - before for times in self._arrivals.values() for before, after in pairwise(times)
        ]

    def add_tokens(self, at_s: float, sample: int = 0) -> None:
        self._arrivals[sample].append(at_s)

    def set_counts(self, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """Store the server's token counts; None leaves a count as it was."""
        if prompt_tokens is not None:
            self._record.prompt_tokens = prompt_tokens
        if output_tokens is not None:
            self._record.output_tokens = output_tokens

    def set_timings(self, timings: Timings) -> None:
        self._record.timings = timings

    def complete(self) -> None:
        """Mark the request successful: its terminal record was read and reports no failure."""
        self._record.error = None

    def finish(self, now_s: float, error: str | None = None) -> Record:
        """Return the record. An `error` makes it a failure even after a terminal record."""
        record = self._record
        record.finished_s = now_s
        record.error = error or record.error
        record.first_s = min((times[0] for times in self._arrivals.values()), default=None)
        gaps_s = self.gaps_s
        record.stall_s = max(gaps_s, default=None)
        record.gap_s = math.fsum(gaps_s) / len(gaps_s) if gaps_s else None
        return record
