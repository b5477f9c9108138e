"""Which requests come when: a trace stretched to a rate, or seeded synthetic ones."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec

from benchmarks.lengths import Lengths, synthetic_lengths
from core.request import Request
from core.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
"""Made once: checking what a request says takes longer than most of what is simulated."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request before any machine has it."""

    id: int
    at_s: float
    lengths: Lengths
    """Without the prefix."""
    prefix: int = 0
    """Which of the common beginnings its prompt has."""
    prefix_tokens: int = 0

    def request(self) -> Request:
        """Its tokens differ from every other request's, but for the prefix.

        The answer ends with the length that the trace has, and no sooner.
        """
        prefix = [self.prefix] * self.prefix_tokens
        prompt = prefix + [token_of(self.id)] * self.lengths.prompt
        params = msgspec.structs.replace(GREEDY, max_tokens=self.lengths.generated)
        return Request(self.id, prompt, params, arrival=self.at_s)


def token_of(request_id: int) -> int:
    """What its prompt and its answer are made of: no other has the same, nor any prefix."""
    return -1 - request_id


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Common beginnings of prompts, such as system prompts; each is as likely as the others."""

    count: int = 1
    num_tokens: int = 0


class Traffic(ABC):
    """The same requests in the same order at any rate; only the time between them is scaled."""

    def __init__(self, max_length: int, prefixes: Prefixes, seed: int) -> None:
        """max_length: of prompt, with its prefix, and answer."""
        self.max_length = max_length
        self.prefixes = prefixes
        self.seed = seed
        self.num_left_out = 0
        """Requests of a trace that are too long."""

    def arrivals(self, rate: float, duration_s: float) -> list[Arrival]:
        """Requests of `duration_s` seconds at `rate` a second, on average."""
        rng, num_tokens = random.Random(self.seed + 1), self.prefixes.num_tokens
        return [
            Arrival(id, at_s, lengths, rng.randrange(self.prefixes.count), num_tokens)
            for id, (at_s, lengths) in enumerate(self._timed(rate, duration_s))
        ]

    @abstractmethod
    def _timed(self, rate: float, duration_s: float) -> list[tuple[float, Lengths]]: ...


class Synthetic(Traffic):
    """Poisson arrivals of log-normal lengths."""

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
    """The rows of a trace that fit, stretched or compressed; they may end before the time does."""

    def __init__(
        self,
        rows: list[tuple[float, Lengths]],
        max_length: int,
        prefixes: Prefixes | None = None,
        seed: int = 0,
    ) -> None:
        """rows: seconds and lengths, in order. Raises ValueError where fewer than two fit."""
        super().__init__(max_length, prefixes or Prefixes(), seed)
        longest = max_length - self.prefixes.num_tokens
        self._rows = [row for row in rows if row[1].fits(longest)]
        self.num_left_out = len(rows) - len(self._rows)
        if len(self._rows) < 2 or self._rows[-1][0] <= self._rows[0][0]:
            raise ValueError(f"the trace needs two requests of at most {longest} tokens")
        self._start_s, end_s = self._rows[0][0], self._rows[-1][0]
        self.rate = (len(self._rows) - 1) / (end_s - self._start_s)
        """Requests per second, as it was recorded."""

    def _timed(self, rate: float, duration_s: float) -> list[tuple[float, Lengths]]:
        timed = [((at_s - self._start_s) * self.rate / rate, each) for at_s, each in self._rows]
        return [row for row in timed if row[0] < duration_s]
