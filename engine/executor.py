"""What the engine asks of whatever computes a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.plan import StepPlan, StepResult


class SubmittedStep(Protocol):
    """A step that the device computes, or has computed."""

    def wait(self) -> StepResult:
        """A result for each chunk with `samples`, once it is there.

        May raise whatever the device raises; the plan's sequences are then ended as failed.
        """
        ...


class Executor(Protocol):
    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> SubmittedStep:
        """Starts one forward over all chunks, or several forwards one after the other.

        The next plan may be submitted before this one's result is waited for: it runs after it,
        and its chunks may end with tokens that this one samples.

        `between_tokens` is called between two forwards of one step, so never where there is one.
        It may abort sequences of the plan, which then have `finish`. May raise as `wait` does.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose result is at hand."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result
