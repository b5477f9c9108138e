"""Request lengths, read from a trace or drawn at random."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

COLUMNS = ("ContextTokens", "GeneratedTokens")
"""The length columns of Azure's public LLM inference traces (2023)."""
TIME = "TIMESTAMP"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a request in tokens."""

    prompt: int
    generated: int

    def fits(self, max_length: int) -> bool:
        return min(self.prompt, self.generated) > 0 and self.prompt + self.generated <= max_length


SHAREGPT = Lengths(161, 338)
ALPACA = Lengths(19, 58)
"""Mean lengths of ShareGPT and Alpaca in the PagedAttention paper (figure 11)."""


def read_trace(path: Path, count: int, max_length: int) -> list[Lengths]:
    """Return the first `count` requests that fit into `max_length` tokens.

    Raises ValueError if the file lacks a column.
    """
    return _fitting((_lengths(row) for row in _rows(path, COLUMNS)), count, max_length)


def read_timed_trace(path: Path) -> list[tuple[float, Lengths]]:
    """Return every request with its seconds since the first one, in order of time.

    Raises ValueError if the file lacks a column, has no rows, or has a malformed row.
    """
    rows = [(_time(row[TIME]), _lengths(row)) for row in _rows(path, (TIME, *COLUMNS))]
    if not rows:
        raise ValueError(f"{path} has no rows")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return [((time - start).total_seconds(), lengths) for time, lengths in rows]


def synthetic_lengths(
    count: int, max_length: int, seed: int = 0, means: Lengths = SHAREGPT
) -> list[Lengths]:
    """Draw `count` requests with log-normal lengths, skipping those of over `max_length` tokens.

    means: means of the distributions, before requests are skipped.
    """
    rng = random.Random(seed)

    def draw(mean: float) -> int:
        return max(1, round(mean * rng.lognormvariate(0, 1) / math.sqrt(math.e)))

    return _fitting(
        (Lengths(draw(means.prompt), draw(means.generated)) for _ in range(100 * count)),
        count,
        max_length,
    )


def _rows(path: Path, columns: Iterable[str]) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := set(columns) - set(reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
        yield from reader


def _lengths(row: dict[str, str]) -> Lengths:
    return Lengths(int(row[COLUMNS[0]]), int(row[COLUMNS[1]]))


def _time(text: str) -> datetime:
    """Parse a timestamp. Azure's have seven fractional digits; the last is cut off."""
    return datetime.fromisoformat(text.strip()[:26])


def _fitting(rows: Iterable[Lengths], count: int, max_length: int) -> list[Lengths]:
    return list(islice((row for row in rows if row.fits(max_length)), count))
