"""The cost model of a step, fitted to a recording.

```
seconds = a + b x rows + c x pairs + d x keys + e x sequences        none of them below 0
```

rows: tokens computed; pairs: pairs of a query and a key; keys: keys that are read. Every other step
is used for the fit, by least squares of errors relative to what the model says. The rest of the
steps tests it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.replay.script import Row, committed_steps
from engine.observers.frames import AnyFrame, Done, Scheduled

MIN_STEPS = 20
LONGEST_GAP_S = 0.05
"""Between two steps of an engine that is busy. A longer one is taken for waiting."""
STRETCHES = 10
T_90 = 1.833
"""Student's t for 9 degrees of freedom: 90 % of values are within so many deviations."""
NUM_FITS = 5
"""Each is weighted by the one before. With weights by the measured seconds, steps that happened to
be fast would count most."""


class Work(NamedTuple):
    """What a step computes."""

    rows: int
    pairs: int
    keys: int
    sequences: int


class Cost(Protocol):
    def seconds(self, work: Work) -> float: ...


def work_of(rows: Iterable[Row]) -> Work:
    rows = list(rows)
    return Work(
        sum(length for _, _, length in rows),
        sum(num_pairs(start, length) for _, start, length in rows),
        sum(start + length for _, start, length in rows),
        len(rows),
    )


def num_pairs(start: int, length: int) -> int:
    """Return the number of causal query-key pairs of the positions `start : start + length`."""
    return length * start + length * (length + 1) // 2


@dataclass(frozen=True, slots=True)
class LinearCost:
    """The factors a to e."""

    factors: tuple[float, ...]

    def seconds(self, work: Work) -> float:
        return float(np.dot(self.factors, (1, *work)))


@dataclass(frozen=True, slots=True)
class FittedCost(LinearCost):
    """A cost model, and how it did on the steps that it was not fitted to."""

    num_tested: int
    median_error: float
    """Of the steps' seconds, relative."""
    total_error: float
    """Of the sum of all seconds, relative and signed."""
    drift: float
    """How far the sum is off in a tenth of the recording, relative: at most this in 9 of 10."""

    @property
    def quality(self) -> str:
        return (
            f"cost model: on {self.num_tested} steps that it was not fitted to, the median error "
            f"is {self.median_error:.1%}, and that of the sum {self.total_error:+.1%}"
        )

    @property
    def uncertainty(self) -> float:
        """By how much all steps together may be off, relative."""
        return self.drift + abs(self.total_error)


def fitted(frames: Sequence[AnyFrame]) -> FittedCost:
    """Fit the model to the steps of a recording. Raises ValueError if they are too few."""
    steps = list(_measured(frames))
    if len(steps) < MIN_STEPS:
        raise ValueError(f"the recording has {len(steps)} steps; a cost model needs {MIN_STEPS}")
    features = np.array([(1, *work) for work, _ in steps], dtype=float)
    seconds = np.array([measured for _, measured in steps])
    factors = _fit(features[::2], seconds[::2], seconds[::2])
    for _ in range(NUM_FITS):
        factors = _fit(features[::2], seconds[::2], features[::2] @ factors)
    tested = features[1::2] @ factors
    return FittedCost(
        tuple(map(float, factors)),
        len(tested),
        float(np.median(np.abs(tested / seconds[1::2] - 1))),
        float(tested.sum() / seconds[1::2].sum() - 1),
        _drift(tested, seconds[1::2]),
    )


def _drift(expected: np.ndarray, seconds: np.ndarray) -> float:
    stretches = zip(
        np.array_split(expected, STRETCHES), np.array_split(seconds, STRETCHES), strict=True
    )
    ratios = [float(a.sum() / b.sum()) for a, b in stretches]
    return T_90 * float(np.std(ratios, ddof=1))


def _fit(features: np.ndarray, seconds: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the factors of least squares, relative to the expected seconds.

    Those that would be negative are 0.
    """
    scale = features.max(axis=0)
    weighted = features / scale / expected[:, None]
    active = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, active], seconds / expected, rcond=None)
        worst = int(found.argmin())
        if found[worst] >= 0 or len(active) == 1:
            break
        del active[worst]
    factors = np.zeros(features.shape[1])
    factors[active] = np.maximum(found, 0) / scale[active]
    return factors


def _measured(frames: Sequence[AnyFrame]) -> Iterable[tuple[Work, float]]:
    """Yield the work of each step, and the seconds to the next one if the engine was busy."""
    walls: list[tuple[Work, float, float]] = []
    now = 0.0
    for frame, _, rows in committed_steps(frames):
        if isinstance(frame, Scheduled):
            now = frame.at
        elif isinstance(frame, Done) and frame.failed is None and rows:
            walls.append((work_of(rows), now, frame.wall_ns / 1e9))
    between = [b - a - wall for (_, a, wall), (_, b, _) in pairwise(walls)]
    gaps = [gap for gap in between if 0 <= gap < LONGEST_GAP_S]
    gap = float(np.median(gaps)) if gaps else 0.0
    return [(work, wall + gap) for work, _, wall in walls if wall > 0]
