"""Simulates a run of a load test: the same requests, strategy and limits, on a simulated clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from benchmarks.load.lengths import Lengths
from benchmarks.simulate.executor import sampled_tokens
from benchmarks.simulate.machine import Machine
from benchmarks.simulate.measured.load_test import MeasuredRun
from benchmarks.simulate.measured.step_time import StepTime
from benchmarks.simulate.traffic import Arrival
from core.configuration.sizing import sequence_limit, step_token_budget
from core.output import Output
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
    """One run on a simulated machine. A user sends a request when the previous one has ended."""

    def __init__(self, run: MeasuredRun, step_time: StepTime) -> None:
        self._run = run
        self._machine = Machine(_strategy(run), self, _StepTimeExecutor(step_time))
        self._waiting = iter(enumerate(run.requests))
        """Requests that are still to be sent."""

    def predict(self) -> Prediction:
        """Serve all requests."""
        requests, machine = self._run.requests, self._machine
        for _ in requests if self._run.users is None else range(self._run.users):
            self._send()
        machine.advance(math.inf)
        seconds = machine.clock - (requests[0].due_s or 0.0)
        return Prediction(len(requests) / seconds, machine.num_sequence_steps / machine.num_steps)

    def add(self, outputs: Iterable[Output], now: float) -> None:
        """Send the next requests of the users whose answers have ended. Called by the machine."""
        for output in outputs:
            if output.finish is not None and self._run.users is not None:
                self._send()

    def _send(self) -> None:
        """Send the next request, if there is one: when it is due, or in a closed loop at once."""
        for index, sent in islice(self._waiting, 1):
            prefix = min(self._run.prefix_tokens, sent.prompt_tokens - 1)
            lengths = Lengths(sent.prompt_tokens - prefix, sent.output_tokens)
            if sent.due_s is not None:
                self._machine.advance(sent.due_s)
            at_s = self._machine.clock if sent.due_s is None else sent.due_s
            self._machine.add(Arrival(index, at_s, lengths, 0, prefix))


class _StepTimeExecutor:
    """Takes the fitted time for each step."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time

    def run(self, plan: StepPlan) -> tuple[float, StepResult]:
        seconds = self._step_time.seconds(len(plan.chunks), plan.num_tokens)
        return seconds, sampled_tokens(plan)


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
