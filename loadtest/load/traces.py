"""Traces: arrival times and lengths of the requests of a real service.

A trace is a CSV with the columns of Azure's public traces of 2023 (Splitwise, ISCA 2024). This
project ships none: without a file, lengths are drawn from log-normal distributions whose
means and deviations are those of Azure's conversation and code traces, and arrivals have the mean
rates of these traces.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from loadtest.load.request import Shape

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A row of a trace."""

    at_s: float
    """Seconds since the first row."""
    shape: Shape


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Distribution of a length in tokens: mean and deviation of its logarithm, and the maximum."""

    mean: float
    deviation: float
    maximum: int

    def draw(self, rng: random.Random) -> int:
        return min(self.maximum, max(1, round(rng.lognormvariate(self.mean, self.deviation))))


@dataclass(frozen=True, slots=True)
class Service:
    """Summary of a trace, from which requests can be drawn."""

    prompt_tokens: LogNormal
    output_tokens: LogNormal
    rate: float
    """Requests per second."""

    def shapes(self, rng: random.Random) -> Iterator[Shape]:
        while True:
            yield Shape(self.prompt_tokens.draw(rng), self.output_tokens.draw(rng))


CONVERSATION = Service(LogNormal(6.63, 0.99, 14050), LogNormal(5.02, 0.86, 1000), 5.53)
CODE = Service(LogNormal(7.00, 1.36, 7437), LogNormal(2.79, 0.85, 1899), 2.57)


def read_trace(path: Path) -> list[Arrival]:
    """Return all rows in file order.

    Raises ValueError if the file lacks a column, has no rows, or has a malformed row.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := set(COLUMNS) - set(reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
        rows = [(datetime.fromisoformat(row["TIMESTAMP"].strip()), _shape(row)) for row in reader]
    if not rows:
        raise ValueError(f"{path} has no rows")
    start = rows[0][0]
    return [Arrival((time - start).total_seconds(), shape) for time, shape in rows]


def _shape(row: dict[str, str]) -> Shape:
    return Shape(max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
