"""When requests came to a real service, and how long they were.

A trace is a CSV with the columns of Azure's public ones (2023; Splitwise, ISCA 2024). None is part
of this project: without a file, requests are drawn from log-normal distributions with the moments
and the mean rates of those two.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from loadtest.ask import Shape

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One row."""

    at_s: float
    """Since the first row."""
    shape: Shape


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Of tokens: mean and standard deviation of the logarithm, and the most there were."""

    mean: float
    deviation: float
    most: int

    def draw(self, rng: random.Random) -> int:
        return min(self.most, max(1, round(rng.lognormvariate(self.mean, self.deviation))))


@dataclass(frozen=True, slots=True)
class Service:
    """What a trace looks like from afar."""

    prompt: LogNormal
    answer: LogNormal
    rate: float
    """Requests per second."""

    def shapes(self, rng: random.Random) -> Iterator[Shape]:
        while True:
            yield Shape(self.prompt.draw(rng), self.answer.draw(rng))


CONVERSATION = Service(LogNormal(6.63, 0.99, 14050), LogNormal(5.02, 0.86, 1000), 5.53)
CODE = Service(LogNormal(7.00, 1.36, 7437), LogNormal(2.79, 0.85, 1899), 2.57)


def read_trace(path: Path) -> list[Arrival]:
    """All rows in order. Raises ValueError for a file without the columns, or with a bad row."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := set(COLUMNS) - set(reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
        rows = [(_time(row["TIMESTAMP"]), _shape(row)) for row in reader]
    if not rows:
        raise ValueError(f"{path} has no rows")
    start = rows[0][0]
    return [Arrival((time - start).total_seconds(), shape) for time, shape in rows]


def _time(text: str) -> datetime:
    """Azure's have seven digits after the point, one more than Python reads."""
    return datetime.fromisoformat(text.strip()[:26])


def _shape(row: dict[str, str]) -> Shape:
    return Shape(max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
