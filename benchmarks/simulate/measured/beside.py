"""Prediction beside measurement: every run of a load test, simulated with a fitted step time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.simulate.measured.calibration import CalibrationError
from benchmarks.simulate.measured.load_test import MeasuredRun, read_runs
from benchmarks.simulate.measured.replay import Replay
from benchmarks.simulate.measured.step_time import StepTime, fitted, is_always_busy

HEAD = (
    "workload", "strategy", "requests/s measured", "requests/s predicted", "error",
    "sequences/step measured", "sequences/step predicted",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The rounds of one strategy under one workload. Figures are medians."""

    workload: str
    strategy: str
    measured: float
    """Requests per second."""
    predicted: float
    measured_batch: float
    predicted_batch: float

    @property
    def error(self) -> float:
        """Relative error of the predicted requests/s."""
        return self.predicted / self.measured - 1


def beside(calibrate: Path, predict: Path | None) -> tuple[list[str], dict[str, Any]]:
    """Fit the step time to one load test and predict another, or the same if `predict` is None.

    Returns the lines to print and what to write as JSON. Raises CalibrationError if the results
    are unreadable or do not determine the step time, and ValueError if a run cannot be simulated.
    """
    runs = _read(calibrate)
    step_time = fitted(runs)
    rows = _rows(runs if predict is None else _read(predict), step_time)
    errors = [abs(row.error) for row in rows]
    lines = [
        f"fitted to {sum(map(is_always_busy, runs))} runs of {calibrate}: {step_time}",
        f"prediction of {predict or calibrate}, medians of the rounds:",
        "",
        *_table(rows),
        "",
        f"mean error of requests/s {mean(errors):.1%}, largest {max(errors):.1%}",
    ]
    written = {"step_time": asdict(step_time), "rows": [asdict(row) for row in rows]}
    return lines, written


def _read(folder: Path) -> list[MeasuredRun]:
    try:
        runs = read_runs(folder)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CalibrationError(
            f"{folder} has no readable results of a load test ({type(error).__name__}: {error}); "
            "give the folder that `longshore compare` has written"
        ) from error
    if not runs:
        raise CalibrationError(
            f"{folder} has no run that can be simulated: only whole runs of our strategies can, "
            "with /metrics and one copy of the model"
        )
    return runs


def _rows(runs: Sequence[MeasuredRun], step_time: StepTime) -> list[Row]:
    rounds: dict[tuple[str, str], list[MeasuredRun]] = {}
    for run in runs:
        rounds.setdefault((run.workload, run.name), []).append(run)
    return [_row(group, step_time) for group in rounds.values()]


def _row(runs: Sequence[MeasuredRun], step_time: StepTime) -> Row:
    predictions = [Replay(run, step_time).predict() for run in runs]
    return Row(
        workload=runs[0].workload,
        strategy=runs[0].name,
        measured=median(run.requests_per_s for run in runs),
        predicted=median(prediction.requests_per_s for prediction in predictions),
        measured_batch=median(run.batch for run in runs),
        predicted_batch=median(prediction.batch for prediction in predictions),
    )


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [
        [
            row.workload, row.strategy, f"{row.measured:.3g}", f"{row.predicted:.3g}",
            f"{row.error:+.1%}", f"{row.measured_batch:.1f}", f"{row.predicted_batch:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return [f"| {' | '.join(line)} |" for line in (HEAD, ["---"] * len(HEAD), *cells)]
