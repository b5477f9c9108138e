"""One simulated machine: a strategy, an executor and a clock."""

from __future__ import annotations

from benchmarks.simulate.cost import Hardware
from benchmarks.simulate.executor import Executor, SimulatedPackedExecutor
from benchmarks.simulate.leap import is_quiet, leap
from benchmarks.simulate.tally import Tally
from benchmarks.simulate.traffic import Arrival
from strategies.base import Strategy


class Machine:
    """Runs steps while it has requests. Times are simulated seconds."""

    def __init__(
        self,
        strategy: Strategy,
        hardware: Hardware,
        tally: Tally,
        executor: Executor | None = None,
        *,
        leaps: bool = True,
    ) -> None:
        """leaps: take consecutive quiet steps (leap.py) at once, which changes no result."""
        self.strategy = strategy
        self.clock = 0.0
        """End of the last step, the earliest time at which the next one may begin."""
        self.num_steps = 0
        self.num_sequence_steps = 0
        """Sum of the batch sizes of all steps."""
        self._hardware = hardware
        self._tally = tally
        self._executor = executor or SimulatedPackedExecutor(hardware)
        self._leaps = leaps
        self._is_quiet = False
        """Whether the next step is certain to be quiet."""
        self._num_unfinished = 0
        self._num_ending = 0
        """Requests that finish when the last step ends."""

    def load(self, now: float) -> int:
        """Return how many requests are unfinished at `now`. Call `advance(now)` first."""
        return self._num_unfinished + (self._num_ending if now < self.clock else 0)

    def add(self, arrival: Arrival) -> None:
        """Add a request. Call `advance` with its arrival time first.

        A step that runs at that time does not include the request.
        """
        if not self.strategy.has_work():
            self.clock = max(self.clock, arrival.at_s)
        request = arrival.request()
        self.strategy.add(request)
        # Behind a request that did not fit, the new one waits, too.
        if self.strategy.waiting[0].request is request:
            self._is_quiet = False
        self._num_unfinished += 1

    def advance(self, until: float) -> None:
        """Run all steps that begin before `until`, but none that begins exactly then."""
        while self.strategy.has_work() and self.clock < until:
            if self._is_quiet and self._leaps:
                self._leap(until)
            else:
                self._step(until)

    def _leap(self, until: float) -> None:
        num_sequences = self.strategy.num_running
        self.clock, steps = leap(self.strategy, self._hardware, self.clock, until)
        self.num_steps += steps
        self.num_sequence_steps += steps * num_sequences
        if steps:
            self._num_ending = 0
        self._is_quiet = self.clock >= until

    def _step(self, until: float) -> None:
        plan = self.strategy.schedule(self.clock)
        if plan is None:
            wake_at = self.strategy.wake_at()
            if wake_at is None or wake_at <= self.clock:
                raise RuntimeError("waiting requests can never be scheduled")
            self.clock = min(wake_at, until)
            return
        num_running = self.strategy.num_running
        seconds, result = self._executor.run(plan)
        self.clock += seconds
        self.num_steps += 1
        self.num_sequence_steps += len(plan.chunks)
        outputs = self.strategy.commit(plan, result)
        self._num_ending = sum(output.finish is not None for output in outputs)
        self._num_unfinished -= self._num_ending
        self._is_quiet = is_quiet(self.strategy, plan, num_running, self._num_ending)
        self._tally.add(outputs, self.clock)
