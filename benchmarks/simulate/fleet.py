"""Machines behind a router, serving a stream of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.simulate.system import Setup, System
from benchmarks.simulate.tally import Figures, Tally
from benchmarks.simulate.traffic import Arrival
from core.routing import Router

SLICE_S = 30.0
"""Simulated seconds between two checks of the latency bound after the last arrival."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a system under some traffic."""

    figures: Figures
    mean_batch: float
    """Mean sequences per step."""
    num_preemptions: int
    loads: tuple[int, ...]
    """Requests routed to each machine."""


class Fleet:
    """Serves a stream of requests once."""

    def __init__(
        self,
        setup: Setup,
        system: System,
        arrivals: Sequence[Arrival],
        router: Router,
        num_machines: int = 1,
    ) -> None:
        self.tally = Tally(arrivals)
        self.machines = [setup.machine(system, self.tally) for _ in range(num_machines)]
        self._arrivals = arrivals
        self._router = router
        self._received = [0] * num_machines

    def run(
        self,
        bound: float = math.inf,
        progress: Callable[[float], None] = lambda now: None,
    ) -> Outcome | None:
        """Serve all requests; give up and return None if the mean latency would exceed `bound`.

        The latency is normalized: divided by the output length. progress: called with the simulated
        time.
        """
        now = 0.0
        for arrival in self._arrivals:
            now = arrival.at_s
            self._advance(now)
            if self.tally.least_normalized_latency(now) > bound:
                return None
            progress(now)
            self._route(arrival)
        while not self.tally.is_complete():
            now += SLICE_S
            self._advance(now)
            if self.tally.least_normalized_latency(now) > bound:
                return None
            progress(now)
        return self._outcome()

    def _advance(self, now: float) -> None:
        for machine in self.machines:
            machine.advance(now)

    def _route(self, arrival: Arrival) -> None:
        now = arrival.at_s
        loads = {str(index): machine.load(now) for index, machine in enumerate(self.machines)}
        chosen = int(self._router.choose(arrival.routed(), loads))
        self._received[chosen] += 1
        self.tally.begin(arrival)
        self.machines[chosen].add(arrival)

    def _outcome(self) -> Outcome:
        num_steps = sum(machine.num_steps for machine in self.machines)
        return Outcome(
            self.tally.figures(),
            sum(machine.num_sequence_steps for machine in self.machines) / num_steps,
            sum(machine.strategy.num_preemptions for machine in self.machines),
            tuple(self._received),
        )
