"""The figures of a schedule, recorded or computed: latencies, throughput and batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.load.journal import percentile
from engine.observers.frames import Arrived


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures over all requests that got a token, in seconds unless noted otherwise."""

    num_requests: int
    requests_per_s: float
    tokens_per_s: float
    """Generated tokens per second, from the first arrival to the last token."""
    first_token: tuple[float, float]
    """From arrival to the first token: the median and the 99th percentile, as the next two; not a
    number if nobody got a first token."""
    inter_token: tuple[float, float]
    """Between two tokens of an answer."""
    end_to_end: tuple[float, float]
    """From arrival to the last token."""
    mean_batch: float
    """Mean sequences per step."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Answer:
    """When a sequence got its tokens. Seconds."""

    arrived: float
    first_token: float | None
    """None, as the next one, if it got none."""
    last_token: float | None
    num_tokens: int


class Tally:
    """Collects the tokens of all sequences."""

    def __init__(
        self,
        arrivals: Iterable[Arrived],
        since: float | None = None,
        newest: Mapping[int, float] | None = None,
    ) -> None:
        """since: when the tally begins; None: with the first arrival. newest: by sequence id, when
        the sequence got its newest token before that."""
        self._since = since
        self._newest = newest or {}
        self._arrived: dict[int, float] = {}
        """When the request of each sequence arrived, by the sequence's id."""
        for arrived in arrivals:
            for id in range(arrived.id, arrived.id + arrived.num_samples):
                self._arrived[id] = arrived.at
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._gaps: list[float] = []
        self._num_tokens: Counter[int] = Counter()
        self.num_steps = 0
        self.num_step_sequences = 0
        self.num_preemptions = 0
        self.most_sequences = 0
        """In a step."""
        self.most_blocks = 0
        """KV blocks held at once."""

    def arrived(self, request_id: int, at: float, num_samples: int) -> None:
        """Note that a request arrived at another time."""
        self._arrived |= dict.fromkeys(range(request_id, request_id + num_samples), at)

    def add(self, sequence_id: int, at: float, count: int) -> None:
        """Count new tokens of a sequence. Unknown ids are ignored."""
        if sequence_id not in self._arrived:
            return
        self._num_tokens[sequence_id] += count
        before = self._last.get(sequence_id, self._newest.get(sequence_id))
        if before is None:
            self._first[sequence_id] = at
        else:
            self._gaps += [(at - before) / count] * count
        self._last[sequence_id] = at

    def answers(self) -> list[Answer]:
        """Return all sequences in order of arrival."""
        return [
            Answer(at, self._first.get(id), self._last.get(id), self._num_tokens[id])
            for id, at in sorted(self._arrived.items(), key=lambda row: (row[1], row[0]))
        ]

    @property
    def seconds(self) -> float:
        """From the first arrival, or the begin of the tally, to the last token."""
        if not self._last:
            return 0.0
        begin = min(self._arrived.values()) if self._since is None else self._since
        return max(max(self._last.values()) - begin, 1e-9)

    def figures(self) -> Figures | None:
        """Return the figures; None if no request got a token."""
        if not self._last:
            return None
        arrived, last, seconds = self._arrived, self._last, self.seconds
        return Figures(
            num_requests=len(last),
            requests_per_s=len(last) / seconds,
            tokens_per_s=self._num_tokens.total() / seconds,
            first_token=_spread([at - arrived[id] for id, at in self._first.items()]),
            inter_token=_spread(self._gaps or [0.0]),
            end_to_end=_spread([at - arrived[id] for id, at in last.items()]),
            mean_batch=self.num_step_sequences / max(1, self.num_steps),
            num_preemptions=self.num_preemptions,
        )


def _spread(values: list[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    return percentile(values, 0.5), percentile(values, 0.99)


def table(rows: dict[str, Figures | None]) -> list[str]:
    """Return a Markdown table, a row for each schedule."""
    names = ["schedule", "answers", "requests/s", "tokens/s", "TTFT p50, p99 ms",
             "ITL p50, p99 ms", "latency p50, p99 s", "sequences/step", "preemptions"]  # fmt: skip
    lines = [names, ["---"] * len(names)]
    lines += [[name, *_cells(figures)] for name, figures in rows.items() if figures is not None]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cells(figures: Figures) -> list[str]:
    return [
        f"{figures.num_requests}",
        f"{figures.requests_per_s:.3g}",
        f"{figures.tokens_per_s:.4g}",
        ", ".join(f"{value * 1e3:.4g}" for value in figures.first_token),
        ", ".join(f"{value * 1e3:.3g}" for value in figures.inter_token),
        ", ".join(f"{value:.3g}" for value in figures.end_to_end),
        f"{figures.mean_batch:.1f}",
        f"{figures.num_preemptions}",
    ]
