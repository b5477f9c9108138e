"""Simulates a run of a load test: the same requests, strategy and limits, on a simulated clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from benchmarks.load.lengths import Lengths
from benchmarks.simulate.executor import tokens
from benchmarks.simulate.measured.load_test import MeasuredRun
from benchmarks.simulate.measured.step_time import StepTime
from benchmarks.simulate.traffic import Arrival
from core.configuration.sizing import sequence_limit, step_token_budget
from core.plan import StepPlan, StepResult
from strategies.base import Limits, Strategy
from strategies.factory import StrategySettings, make_strategy


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulated figures of a run."""

    requests_per_s: float
    batch: float
    """Mean sequences in a step."""


class Replay:
    """One run on a simulated clock. A user sends a request when the previous one has ended."""

    def __init__(self, run: MeasuredRun, step_time: StepTime) -> None:
        self._run = run
        self._step_time = step_time
        self._strategy = _strategy(run)
        self._waiting = deque(enumerate(run.requests))
        """Requests that are still to be sent."""
        self._clock = 0.0
        self._num_steps = 0
        self._num_sequences = 0

    def predict(self) -> Prediction:
        """Serve all requests."""
        for _ in range(self._run.users or 0):
            self._send()
        while self._strategy.has_work() or self._waiting:
            self._send_due()
            self._step()
        return Prediction(
            len(self._run.requests) / (self._clock - self._first_s),
            self._num_sequences / self._num_steps,
        )

    @property
    def _first_s(self) -> float:
        return self._run.requests[0].due_s or 0.0

    @property
    def _next_due_s(self) -> float:
        """Arrival of the next request of an open loop; infinity if there is none."""
        due_s = self._waiting[0][1].due_s if self._waiting else None
        return float("inf") if due_s is None else due_s

    def _send_due(self) -> None:
        if not self._strategy.has_work() and self._run.users is None:
            self._clock = max(self._clock, self._next_due_s)
        while self._next_due_s <= self._clock:
            self._send()

    def _send(self) -> None:
        if not self._waiting:
            return
        index, sent = self._waiting.popleft()
        prefix = min(self._run.prefix_tokens, sent.prompt_tokens - 1)
        lengths = Lengths(sent.prompt_tokens - prefix, sent.output_tokens)
        at_s = self._clock if sent.due_s is None else sent.due_s
        self._strategy.add(Arrival(index, at_s, lengths, 0, prefix).request())

    def _step(self) -> None:
        plan = self._strategy.schedule(self._clock)
        if plan is None:
            wake_at = self._strategy.wake_at()
            assert wake_at is not None, "requests wait, but none runs that they could wait for"
            self._clock = min(wake_at, self._next_due_s)
            return
        num_sequences = len(plan.chunks)
        self._clock += self._step_time.seconds(num_sequences, plan.num_tokens)
        self._num_steps += 1
        self._num_sequences += num_sequences
        for output in self._strategy.commit(plan, _result(plan)):
            if output.finish is not None and self._run.users is not None:
                self._send()


def _result(plan: StepPlan) -> StepResult:
    return {
        chunk.sequence.id: tokens(chunk.sequence, 1) for chunk in plan.chunks if chunk.samples_token
    }


def _strategy(run: MeasuredRun) -> Strategy:
    """Make the run's strategy with the limits that its server had. Preemption is by recomputation.

    Raises ValueError if the server's properties do not set option.max_model_len.
    """
    options = run.options
    if options.memory.max_model_len is None:
        raise ValueError(
            f"{run.name} on {run.workload}: the server's option.max_model_len is unknown; set it "
            "in its properties and measure again"
        )
    return make_strategy(
        StrategySettings(
            batching=run.batching,
            num_blocks=run.num_blocks,
            block_size=options.memory.block_size,
            max_model_len=options.memory.max_model_len,
            limits=Limits(
                max_sequences=sequence_limit(options.strategy, run.batching),
                max_step_tokens=step_token_budget(options.strategy, run.device),
            ),
            max_delay_s=options.strategy.max_batch_delay / 1000,
            kv_reservation=options.strategy.kv_reservation,
            enable_prefix_caching=options.memory.enable_prefix_caching and run.prefix_tokens > 0,
            preemption_mode="recompute",
            num_swap_blocks=0,
        )
    )
