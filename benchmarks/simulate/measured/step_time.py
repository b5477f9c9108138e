"""The time of a step, fitted to the runs of a load test.

```
seconds of a step = per_step + per_sequence x sequences + per_token x tokens
```

A sequence costs more than its tokens, since its token is sampled, sent and turned into text. The
fit minimizes the squared relative errors of the runs' durations. It uses the runs in which the
server always had something to do: closed loops, and not `dynamic`, which waits for its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulate.measured.calibration import CalibrationError
from benchmarks.simulate.measured.load_test import MeasuredRun


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, of each of its sequences, and of each of its tokens."""

    per_step: float
    per_sequence: float
    per_token: float

    def seconds(self, num_sequences: int, num_tokens: int) -> float:
        return self.per_step + self.per_sequence * num_sequences + self.per_token * num_tokens

    def __str__(self) -> str:
        step, sequence, token = (
            f"{1e3 * seconds:.3g} ms"
            for seconds in (self.per_step, self.per_sequence, self.per_token)
        )
        return f"{step} per step, {sequence} per sequence, {token} per token"


def is_always_busy(run: MeasuredRun) -> bool:
    """Return whether the server had something to do until the end of the run."""
    return run.users is not None and run.batching != "dynamic"


def fitted(runs: Sequence[MeasuredRun]) -> StepTime:
    """Fit the time of a step to the runs that were always busy.

    Raises CalibrationError if they do not determine it.
    """
    busy = [run for run in runs if is_always_busy(run)]
    rows = [[run.num_steps, run.num_sequences, run.num_tokens] for run in busy]
    relative = np.array([np.array(row) / run.seconds for row, run in zip(rows, busy, strict=True)])
    if len(busy) < 3 or np.linalg.matrix_rank(relative) < 3:
        raise CalibrationError(
            f"{len(busy)} closed-loop runs of none, continuous or paged do not determine the time "
            "of a step; measure several strategies and workloads, as `make compare` does"
        )
    found, *_ = np.linalg.lstsq(relative, np.ones(len(busy)))
    if min(found) < 0:
        raise CalibrationError(
            f"the fit gives a negative time ({StepTime(*map(float, found))}); measure again on a "
            "quiet machine"
        )
    return StepTime(*map(float, found))
