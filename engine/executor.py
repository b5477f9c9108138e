"""What the engine asks of whatever computes a step."""

from __future__ import annotations

from typing import Protocol

from core.plan import StepPlan, StepResult


class Executor(Protocol):
    def run(self, plan: StepPlan) -> StepResult:
        """One forward over all chunks; a result for each chunk with `samples`.

        May raise whatever the device raises; the plan's sequences are then ended as failed.
        """
        ...
