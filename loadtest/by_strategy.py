"""A page beside locust's own: requests and tokens per second, a line for each strategy.

locust's charts show the total of the current run. This page keeps the last run of each strategy, so
that runs made one after another can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flask import Flask, Response, jsonify

from loadtest.load.record import Record
from loadtest.report.style import OTHER, STRATEGIES

PATH = "/strategies"
WINDOW_S = 5
"""Each point of a line is the mean over this many seconds."""
_PAGE = Path(__file__).with_name("by_strategy.html")


@dataclass
class Line:
    """Counts of one run, for each second since its start."""

    strategy: str | None
    started: float
    requests: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])

    def add(self, num_tokens: int, now: float) -> None:
        """Count a request that ended at `now`, a time of the same clock as `started`."""
        second = int(now - self.started)
        for counts in (self.requests, self.tokens):
            counts += [0] * (second + 1 - len(counts))
        self.requests[second] += 1
        self.tokens[second] += num_tokens


class ByStrategy:
    """The lines by their labels, in the order of their runs."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._current: Line | None = None

    def begin(self, label: str, strategy: str | None, now: float) -> None:
        """Begin a run, which replaces an earlier run with the same label. now: seconds."""
        self._current = Line(strategy, now)
        self._lines.pop(label, None)
        self._lines[label] = self._current

    def add(self, record: Record, now: float) -> None:
        """Count a request of the current run that ended at `now`, unless it failed."""
        if self._current is not None and record.is_good:
            self._current.add(record.output_tokens or 0, now)

    def serve(self, app: Flask) -> None:
        """Add the page to locust's web application."""

        def page() -> Response:
            return Response(_PAGE.read_bytes(), mimetype="text/html")

        def data() -> Response:
            return jsonify(self.data())

        app.add_url_rule(PATH, "by_strategy", page)
        app.add_url_rule(f"{PATH}/data", "by_strategy_data", data)

    def data(self) -> list[dict[str, object]]:
        """Return what the page draws: for each line its label, its colour and its points."""
        return [
            {
                "label": label,
                "colour": STRATEGIES.get(line.strategy or "", OTHER),
                "requests/s": smoothed(line.requests),
                "output tokens/s": smoothed(line.tokens),
            }
            for label, line in self._lines.items()
        ]


def smoothed(counts: list[int]) -> list[float]:
    """Return for each second the mean over the last WINDOW_S seconds, or over all so far.

    The last second is left out, since it may not be over.
    """
    windows = (counts[max(0, end - WINDOW_S) : end] for end in range(1, len(counts)))
    return [round(sum(window) / len(window), 2) for window in windows]
