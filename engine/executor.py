"""The interface of an executor, which computes steps for the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.plan import StepPlan, StepResult


class SubmittedStep(Protocol):
    """A step that was submitted to the device."""

    def wait(self) -> StepResult:
        """Block until the step is done. Return the results of its chunks (see `StepResult`).

        May raise any error of the device; the engine then fails the plan's sequences.
        """
        ...


class Executor(Protocol):
    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> SubmittedStep:
        """Start one forward pass over all chunks, or several, one after the other.

        The next plan may be submitted before this one is done. It runs after this plan, and its
        chunks may end with tokens that this plan samples.

        `between_tokens` is called between the forward passes of a step, if there are several. It
        may abort sequences of the plan; these then have `finish` set. Raises as `wait` does.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that is already done."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result
