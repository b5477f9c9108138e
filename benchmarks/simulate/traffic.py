"""Requests and their arrival times: a trace scaled to a rate, or synthetic requests."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

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
