"""Lengths of requests: from a trace, or synthetic ones where there is none at hand."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

COLUMNS = ("ContextTokens", "GeneratedTokens")
"""Beside TIMESTAMP, those of Azure's public traces of language model inference (2023)."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request, in tokens."""

    prompt: int
    generated: int


def read_trace(path: Path, count: int, max_length: int) -> list[Lengths]:
    """The first `count` requests that fit into `max_length` tokens.

    Raises ValueError for a file without the columns.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := set(COLUMNS) - set(reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
        rows = (Lengths(int(row[COLUMNS[0]]), int(row[COLUMNS[1]])) for row in reader)
        return _fitting(rows, count, max_length)


def synthetic_lengths(count: int, max_length: int, seed: int = 0) -> list[Lengths]:
    """Log-normal lengths with the means that the paper gives for ShareGPT: 161 and 338 tokens."""
    rng = random.Random(seed)

    def drawn(mean: float) -> int:
        return max(1, round(mean * rng.lognormvariate(0, 1) / math.sqrt(math.e)))

    return _fitting(
        (Lengths(drawn(161), drawn(338)) for _ in range(100 * count)), count, max_length
    )


def _fitting(rows: Iterable[Lengths], count: int, max_length: int) -> list[Lengths]:
    fitting = (
        row
        for row in rows
        if min(row.prompt, row.generated) > 0 and row.prompt + row.generated <= max_length
    )
    return list(islice(fitting, count))
