"""What steps cost is measured in little time, also if they are slow."""

from __future__ import annotations

from functools import partial

import pytest

from core.configuration.kv_layout import KVLayout
from core.plan import StepPlan
from core.sampling import Sampled
from engine.executor import FinishedStep, SubmittedStep
from engine.speculation.measure import MOST_SECONDS, StepTimer, measure_costs, measure_passes
from strategies.base import Limits
from strategies.speculation.costs import StepCosts


class SlowExecutor:
    """Steps take 80 ms, and 6 ms for each row."""

    def __init__(self) -> None:
        self.now = 0.0

    def submit(self, plan: StepPlan, between_tokens: object) -> SubmittedStep:
        self.now += 0.08 + 0.006 * sum(chunk.length for chunk in plan.chunks)
        return FinishedStep({})


def test_slow_steps_of_many_rows_are_timed():
    executor = SlowExecutor()
    timer = StepTimer(executor, KVLayout.uniform(16).groups, 64, 100, 5, lambda: executor.now)
    limits = Limits(max_sequences=50, max_step_tokens=2048)
    costs = measure_costs(timer, limits, num_drafts=5, max_model_len=1024, num_ahead=250)
    assert executor.now < MOST_SECONDS + 1.5
    for num_decodes, num_drafts in ((1, 0), (1, 5), (50, 0), (50, 50), (50, 100), (50, 200)):
        expected = 0.08 + 0.006 * (num_decodes + num_drafts)
        assert costs.of(num_decodes, num_drafts) == pytest.approx(expected, rel=0.1)


class OverlappingExecutor(SlowExecutor):
    """Of the time of each step, 50 ms pass while the step before runs."""

    ends = 0.0

    def submit(self, plan: StepPlan, between_tokens: object) -> SubmittedStep:
        seconds = 0.08 + 0.006 * sum(chunk.length for chunk in plan.chunks)
        self.ends = max(self.now + seconds, self.ends + seconds - 0.05)
        return Waiting(self)


class Waiting:
    def __init__(self, executor: OverlappingExecutor) -> None:
        self.executor, self.ends = executor, executor.ends

    def wait(self) -> dict[int, Sampled]:
        self.executor.now = max(self.executor.now, self.ends)
        return {}


def test_what_steps_without_drafts_hide_is_measured():
    for executor, hidden in ((SlowExecutor(), 0.0), (OverlappingExecutor(), 0.05)):
        timer = StepTimer(
            executor, KVLayout.uniform(16).groups, 64, 100, 5, partial(getattr, executor, "now")
        )
        limits = Limits(max_sequences=8, max_step_tokens=2048)
        costs = measure_costs(
            timer, limits, num_drafts=5, max_model_len=1024, num_ahead=40, overlaps=True
        )
        assert costs.hidden == pytest.approx([hidden] * 9 if hidden else [])
        assert costs.of(8) == pytest.approx(0.128 - hidden)
        assert costs.of(8, 40) == pytest.approx(0.08 + 0.006 * 48)


def test_passes_and_what_a_model_reads_are_timed():
    executor = SlowExecutor()
    timer = StepTimer(executor, KVLayout.uniform(16).groups, 64, 100, 0, lambda: executor.now)
    costs = StepCosts(plain=(0.0, 1.0), drafted=(0.0, 1.0), width=6)
    costs = measure_passes(timer, costs, context=256, max_step_tokens=100)
    assert costs.per_pass == pytest.approx(0.08)
    assert costs.per_proposal == pytest.approx(0.006)
    assert costs.per_read == pytest.approx(0.006)
