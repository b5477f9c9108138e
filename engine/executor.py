"""What the engine asks of whatever computes a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from core.plan import StepPlan, StepResult


class Executor(Protocol):
    def run(self, plan: StepPlan, between_tokens: Callable[[], None]) -> StepResult:
        """One forward over all chunks, or several; a result for each chunk with `samples`.

        `between_tokens` is called between two forwards of one run, so never where there is one.
        It may abort sequences of the plan, which then have `finish`.

        May raise whatever the device raises; the plan's sequences are then ended as failed.
        """
        ...
