"""Requests and their arrival times: a trace scaled to a rate, or synthetic requests."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from operator import itemgetter

import msgspec

from benchmarks.load.lengths import Lengths, synthetic_lengths
from core.request import Request
from core.routing import RoutedRequest
from core.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
"""Created once: validating these parameters for each request would take most of the time."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it arrives at the router."""

    id: int
    at_s: float
    lengths: Lengths
    """Lengths without the prefix."""
    prefix: int = 0
    """Index of the shared prefix that its prompt begins with."""
    prefix_tokens: int = 0

    def request(self) -> Request:
        """Return the request for a strategy; beyond the prefix it shares no token with any other.

        Its output always reaches the length given by the traffic.
        """
        prefix = [self.prefix] * self.prefix_tokens
        prompt = prefix + [token_of(self.id)] * self.lengths.prompt
        params = msgspec.structs.replace(GREEDY, max_tokens=self.lengths.generated)
        return Request(self.id, prompt, params, arrival=self.at_s)

    def routed(self) -> RoutedRequest:
        """Return what the router knows of the request."""
        return RoutedRequest(None, (self.prefix,))


def token_of(request_id: int) -> int:
    """Return the token that fills a request's prompt and output. Nothing else contains it."""
    return -1 - request_id


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Shared prefixes of prompts, such as system prompts, all equally likely."""

    count: int = 1
    num_tokens: int = 0


class Traffic(ABC):
    """Generates the same requests in the same order at any rate, only with scaled arrival times."""

    def __init__(self, max_length: int, prefixes: Prefixes, seed: int) -> None:
        """max_length: maximum tokens of prefix, prompt and output together."""
        self.max_length = max_length
        self.prefixes = prefixes
        self.seed = seed
        self.num_left_out = 0
        """Requests of a trace skipped as too long."""

    def arrivals(self, rate: float, duration_s: float) -> list[Arrival]:
        """Return the requests of `duration_s` seconds at a mean of `rate` requests per second."""
        rng, num_tokens = random.Random(self.seed + 1), self.prefixes.num_tokens
        return [
            Arrival(id, at_s, lengths, rng.randrange(self.prefixes.count), num_tokens)
            for id, (at_s, lengths) in enumerate(self._timed(rate, duration_s))
        ]

    @abstractmethod
    def _timed(self, rate: float, duration_s: float) -> list[tuple[float, Lengths]]: ...


class Synthetic(Traffic):
    """Poisson arrivals with log-normal lengths."""

    def __init__(
        self, means: Lengths, max_length: int, prefixes: Prefixes | None = None, seed: int = 0
    ) -> None:
        super().__init__(max_length, prefixes or Prefixes(), seed)
        self.means = means

    def _timed(self, rate: float, duration_s: float) -> list[tuple[float, Lengths]]:
        rng, times = random.Random(self.seed), list[float]()
        at_s = rng.expovariate(1) / rate
        while at_s < duration_s:
            times.append(at_s)
            at_s += rng.expovariate(1) / rate
        longest = self.max_length - self.prefixes.num_tokens
        lengths = synthetic_lengths(len(times), longest, self.seed, self.means)
        return list(zip(times, lengths, strict=True))


class Trace(Traffic):
    """The requests of a trace that fit, scaled in time; they may end before the duration does."""

    def __init__(
        self,
        rows: list[tuple[float, Lengths]],
        max_length: int,
        prefixes: Prefixes | None = None,
        seed: int = 0,
    ) -> None:
        """rows: arrival seconds and lengths, in order. Raises ValueError if fewer than two fit."""
        super().__init__(max_length, prefixes or Prefixes(), seed)
        longest = max_length - self.prefixes.num_tokens
        self._rows = [row for row in rows if row[1].fits(longest)]
        self.num_left_out = len(rows) - len(self._rows)
        if len(self._rows) < 2 or self._rows[-1][0] <= self._rows[0][0]:
            raise ValueError(
                f"the trace needs at least two requests of at most {longest} tokens that arrive at "
                "different times"
            )
        self._start_s, end_s = self._rows[0][0], self._rows[-1][0]
        self.rate = (len(self._rows) - 1) / (end_s - self._start_s)
        """Requests per second of the recording."""

    def _timed(self, rate: float, duration_s: float) -> list[tuple[float, Lengths]]:
        timed = [
            ((at_s - self._start_s) * self.rate / rate, lengths) for at_s, lengths in self._rows
        ]
        return [row for row in timed if row[0] < duration_s]


class Superposed(Trace):
    """Several services with one trace, each starting at a random place and wrapping around.

    The more services, the more their bursts even out. At a higher rate, each service gets further
    in the trace.
    """

    def __init__(
        self,
        rows: list[tuple[float, Lengths]],
        max_length: int,
        prefixes: Prefixes | None = None,
        seed: int = 0,
        *,
        num_services: int,
    ) -> None:
        """Raises ValueError as Trace does."""
        super().__init__(rows, max_length, prefixes, seed)
        self._num_services = num_services

    def _timed(self, rate: float, duration_s: float) -> list[tuple[float, Lengths]]:
        rng, scale = random.Random(self.seed), self.rate * self._num_services / rate
        period_s = len(self._rows) / self.rate
        timed = [
            (at_s * scale, lengths)
            for _ in range(self._num_services)
            for at_s, lengths in self._window(rng.random() * period_s, duration_s / scale)
        ]
        return sorted(timed, key=itemgetter(0))

    def _window(self, from_s: float, length_s: float) -> Iterator[tuple[float, Lengths]]:
        """Yield the requests of `length_s` seconds of the trace, with seconds since `from_s`."""
        from_s, period_s = from_s + self._start_s, len(self._rows) / self.rate
        first = bisect_left(self._rows, from_s, key=itemgetter(0))
        for index in count(first):
            lap, place = divmod(index, len(self._rows))
            at_s, lengths = self._rows[place]
            since_s = at_s + lap * period_s - from_s
            if since_s >= length_s:
                return
            yield since_s, lengths
