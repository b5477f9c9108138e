"""The interfaces of an executor, which computes steps for the engine, and of an observer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from core.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from core.output import Output
    from core.protocol.stats import Receipt
    from core.request import Request


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


FailedAt = Literal["submit", "memory", "wait"]
"""Where a step failed. memory: while it was submitted, so only its largest request ends."""


class Observer:
    """Sees everything, changes no schedule and raises nothing. This class: does not even look.

    ```
    begins ▶ scheduled ▶ (failed) ▶ computed or failed ▶ ends
                         this step  the oldest step: this one or, with overlap, the one before
    ```

    `added` and `aborted` may come between any two others. A step that ends the engine does not
    come to `ends`.
    """

    def added(self, request: Request) -> None:
        """See a request that was just queued."""

    def aborted(self, request_id: int, index: int | None, reason: str) -> Receipt | None:
        """See the end of a request, or of its answer `index`. The id may be unknown.

        Returns what the request has cost, if it is at its end and somebody counts that.
        """

    def begins(self, now: float) -> None:
        """See that a step begins."""

    def scheduled(self, plan: StepPlan | None) -> None:
        """See the plan that the strategy has made."""

    def computed(self, plan: StepPlan, result: StepResult) -> None:
        """See the result of a step before the strategy commits it."""

    def failed(self, plan: StepPlan, where: FailedAt) -> None:
        """See a step that failed, before its requests end."""

    def ends(self, outputs: Sequence[Output]) -> Sequence[Output]:
        """See what the step returns, once everything is committed. May add to it."""
        return outputs
