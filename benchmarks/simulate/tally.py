"""Collects the latencies that clients see and computes figures from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from benchmarks.load.journal import percentile
from benchmarks.simulate.traffic import Arrival
from core.output import Output


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures over all requests, in seconds unless noted otherwise."""

    num_requests: int
    requests_per_s: float
    """Requests divided by the seconds from the first arrival to the end of the last request."""
    tokens_per_s: float
    """Output tokens per second."""
    normalized_latency: float
    """Mean over requests of latency divided by output length, in seconds per token."""
    normalized_latency_p99: float
    first_token_p50: float
    first_token_p99: float
    latency_p50: float
    latency_p99: float


class Tally:
    """Collects the outputs of all machines and checks that every request finishes exactly once."""

    def __init__(self, arrivals: Collection[Arrival]) -> None:
        self._arrivals = {arrival.id: arrival for arrival in arrivals}
        self.first_tokens: dict[int, float] = {}
        """Seconds from arrival to first token, by request id."""
        self.latencies: dict[int, float] = {}
        """Seconds from arrival to the last token, by request id."""
        self._last = 0.0
        """End of the last finished request."""
        self._finished_sum = 0.0
        """Sum of the normalized latencies of finished requests."""
        self._inverse_lengths = 0.0
        """Sum of 1 / output length over unfinished requests."""
        self._weighted_arrivals = 0.0
        """Sum of arrival time / output length over unfinished requests."""

    def begin(self, arrival: Arrival) -> None:
        self._inverse_lengths += 1 / arrival.lengths.generated
        self._weighted_arrivals += arrival.at_s / arrival.lengths.generated

    def add(self, outputs: Iterable[Output], now: float) -> None:
        for output in outputs:
            if output.request_id not in self.first_tokens:
                self.first_tokens[output.request_id] = now - self._at(output.request_id)
            if output.finish is not None:
                self._end(self._arrivals[output.request_id], now)

    def is_complete(self) -> bool:
        """Return whether all requests have finished."""
        return len(self.latencies) == len(self._arrivals)

    def least_normalized_latency(self, now: float) -> float:
        """Return a lower bound, at time `now`, of the final mean over all requests."""
        unfinished_sum = now * self._inverse_lengths - self._weighted_arrivals
        return (self._finished_sum + max(0.0, unfinished_sum)) / max(1, len(self._arrivals))

    def figures(self) -> Figures:
        """Compute the figures. All requests must have finished."""
        assert self.is_complete(), "some requests are unfinished"
        arrivals = self._arrivals.values()
        normalized = [self._normalized(arrival) for arrival in arrivals]
        latencies, firsts = list(self.latencies.values()), list(self.first_tokens.values())
        seconds = self._last - min(arrival.at_s for arrival in arrivals)
        num_tokens = sum(arrival.lengths.generated for arrival in arrivals)
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
        assert arrival.id not in self.latencies, f"request {arrival.id} finished twice"
        self.latencies[arrival.id] = now - arrival.at_s
        self._last = max(self._last, now)
        self._finished_sum += self._normalized(arrival)
        self._inverse_lengths -= 1 / arrival.lengths.generated
        self._weighted_arrivals -= arrival.at_s / arrival.lengths.generated

    def _normalized(self, arrival: Arrival) -> float:
        return self.latencies[arrival.id] / arrival.lengths.generated

    def _at(self, request_id: int) -> float:
        return self._arrivals[request_id].at_s
