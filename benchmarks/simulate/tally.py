"""What the clients saw, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from benchmarks.journal import percentile
from benchmarks.simulate.traffic import Arrival
from core.plan import Output


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all requests. Seconds, unless it says otherwise."""

    num_requests: int
    requests_per_s: float
    """Answers over the time from the first arrival to the last answer's end."""
    tokens_per_s: float
    """Of answers."""
    normalized_latency: float
    """Seconds per token: mean over requests of latency over length of the answer."""
    normalized_latency_p99: float
    first_token_p50: float
    first_token_p99: float
    latency_p50: float
    latency_p99: float


class Tally:
    """Takes the outputs of all machines; every request is to be answered exactly once."""

    def __init__(self, arrivals: Collection[Arrival]) -> None:
        self._arrivals = {arrival.id: arrival for arrival in arrivals}
        self.first_tokens: dict[int, float] = {}
        """By request id: seconds from its arrival."""
        self.latencies: dict[int, float] = {}
        """The same, to the end of its answer."""
        self._last = 0.0
        self._sum = 0.0
        """Of normalised latencies of those that are answered."""
        self._num_late = 0.0
        self._due = 0.0
        """Over those under way: sums of 1 / length, and of arrival / length."""

    def begin(self, arrival: Arrival) -> None:
        self._num_late += 1 / arrival.lengths.generated
        self._due += arrival.at_s / arrival.lengths.generated

    def take(self, outputs: Iterable[Output], now: float) -> None:
        for output in outputs:
            if output.request_id not in self.first_tokens:
                self.first_tokens[output.request_id] = now - self._at(output.request_id)
            if output.finish is not None:
                self._end(self._arrivals[output.request_id], now)

    def is_answered(self) -> bool:
        return len(self.latencies) == len(self._arrivals)

    def least_normalized_latency(self, now: float) -> float:
        """What the mean over all requests will be at least, whatever happens after `now`."""
        under_way = now * self._num_late - self._due
        return (self._sum + max(0.0, under_way)) / max(1, len(self._arrivals))

    def figures(self) -> Figures:
        """To be asked once all are answered."""
        assert self.is_answered(), "some requests have no answer"
        normalized = [self._normalized(each) for each in self._arrivals.values()]
        latencies, firsts = list(self.latencies.values()), list(self.first_tokens.values())
        seconds = self._last - min(each.at_s for each in self._arrivals.values())
        num_tokens = sum(each.lengths.generated for each in self._arrivals.values())
        return Figures(
            num_requests=len(normalized),
            requests_per_s=len(normalized) / seconds,
            tokens_per_s=num_tokens / seconds,
            normalized_latency=sum(normalized) / len(normalized),
            normalized_latency_p99=percentile(normalized, 0.99),
            first_token_p50=percentile(firsts, 0.5),
            first_token_p99=percentile(firsts, 0.99),
            latency_p50=percentile(latencies, 0.5),
            latency_p99=percentile(latencies, 0.99),
        )

    def _end(self, arrival: Arrival, now: float) -> None:
        assert arrival.id not in self.latencies, f"request {arrival.id} is answered twice"
        self.latencies[arrival.id] = now - arrival.at_s
        self._last = max(self._last, now)
        self._sum += self._normalized(arrival)
        self._num_late -= 1 / arrival.lengths.generated
        self._due -= arrival.at_s / arrival.lengths.generated

    def _normalized(self, arrival: Arrival) -> float:
        return self.latencies[arrival.id] / arrival.lengths.generated

    def _at(self, request_id: int) -> float:
        return self._arrivals[request_id].at_s
