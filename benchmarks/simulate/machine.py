"""One simulated machine: a strategy, an executor and a clock."""

from __future__ import annotations

from benchmarks.simulate.executor import Executor
from benchmarks.simulate.tally import Tally
from benchmarks.simulate.traffic import Arrival
from strategies.base import Strategy


class Machine:
    """Runs steps while it has requests. Times are simulated seconds."""

    def __init__(self, strategy: Strategy, tally: Tally, executor: Executor) -> None:
        self.strategy = strategy
        self.clock = 0.0
        """End of the last step, the earliest time at which the next one may begin."""
        self.num_steps = 0
        self.num_sequence_steps = 0
        """Sum of the batch sizes of all steps."""
        self._tally = tally
        self._executor = executor
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
        self.strategy.add(arrival.request())
        self._num_unfinished += 1

    def advance(self, until: float) -> None:
        """Run all steps that begin before `until`, but none that begins exactly then."""
        while self.strategy.has_work() and self.clock < until:
            self._step(until)

    def _step(self, until: float) -> None:
        plan = self.strategy.schedule(self.clock)
        if plan is None:
            wake_at = self.strategy.wake_at()
            if wake_at is None or wake_at <= self.clock:
                raise RuntimeError("waiting requests can never be scheduled")
            self.clock = min(wake_at, until)
            return
        seconds, result = self._executor.run(plan)
        self.clock += seconds
        self.num_steps += 1
        self.num_sequence_steps += len(plan.chunks)
        outputs = self.strategy.commit(plan, result)
        self._num_ending = sum(output.finish is not None for output in outputs)
        self._num_unfinished -= self._num_ending
        self._tally.add(outputs, self.clock)
