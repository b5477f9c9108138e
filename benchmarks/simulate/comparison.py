"""Compares all systems under the same traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.simulate.fleet import Fleet, Outcome
from benchmarks.simulate.knee import highest_rate
from benchmarks.simulate.system import SYSTEMS, Setup
from benchmarks.simulate.traffic import Traffic
from core.routing import ROUTERS

Progress = Callable[[str, float], None]
WHY_DIFFERENT = """\
This is a simulation: no model ran, and no speed was measured. It differs from the paper as follows:
- Step times come from a roofline model. The paper's systems had their own kernels, hosts and
  interconnects, and vLLM's attention kernel was slower than FasterTransformer's. The cost of sums
  between GPUs is assumed.
- All systems use our strategies, with chunked prefill: long prompts run in chunks next to decodes,
  within a token budget. The paper's systems computed each prompt in one step.
- Synthetic lengths are log-normal with the paper's means, not ShareGPT's conversations. Short
  outputs weigh most in a mean of latency over length.
- FasterTransformer is modelled as a padded static batch of as many requests as fit at the maximum
  length. All of its requests finish when the longest one does.
- The paper reads its factors off curves at "similar latencies"; here one latency bound decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A simulation to run: machines, traffic and systems."""

    setup: Setup
    traffic: Traffic
    duration_s: float
    systems: Sequence[str]
    num_machines: int = 1
    router: str = "least-loaded"

    def serve(
        self, system: str, rate: float, bound: float, progress: Callable[[float], None]
    ) -> Outcome | None:
        """Simulate a system at a rate; return None if the mean normalized latency exceeds `bound`.

        Also returns None if there are no arrivals.
        """
        arrivals = self.traffic.arrivals(rate, self.duration_s)
        if not arrivals:
            return None
        router = ROUTERS[self.router]()
        return Fleet(self.setup, SYSTEMS[system], arrivals, router, self.num_machines).run(
            bound, progress
        )


@dataclass(frozen=True, slots=True)
class SystemRow:
    """A system at the requested rate, or at the highest rate that it sustains."""

    system: str
    rate: float
    """Requests per second; 0 if the system sustains no rate."""
    outcome: Outcome | None


def replay(task: Task, rate: float, progress: Progress) -> list[SystemRow]:
    """Run every system at one rate without a latency bound."""
    return [
        SystemRow(
            name, rate, task.serve(name, rate, math.inf, lambda now, name=name: progress(name, now))
        )
        for name in task.systems
    ]


def compare(task: Task, bound: float, progress: Progress) -> list[SystemRow]:
    """Run every system at the highest rate whose mean normalized latency is within `bound`."""
    return [_knee(task, name, bound, progress) for name in task.systems]


def _knee(task: Task, name: str, bound: float, progress: Progress) -> SystemRow:
    found = highest_rate(
        lambda rate: task.serve(
            name, rate, bound, lambda now: progress(f"{name} {rate:.3g}/s", now)
        ),
        start=float(task.num_machines),
    )
    return SystemRow(name, 0.0, None) if found is None else SystemRow(name, *found)


def as_json(rows: Sequence[SystemRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
