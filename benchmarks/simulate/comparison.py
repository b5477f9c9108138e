"""All systems under the same traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.simulate.fleet import Fleet, Outcome
from benchmarks.simulate.knee import highest_rate
from benchmarks.simulate.router import ROUTERS
from benchmarks.simulate.system import SYSTEMS, Setup
from benchmarks.simulate.traffic import Traffic

Progress = Callable[[str, float], None]
WHY_DIFFERENT = """\
A simulation: no model ran, and no speed was measured. Where it differs from the paper, and why:
- Steps cost what a roofline says; the paper's systems had kernels, hosts and links of their own,
  and vLLM's attention kernel was slower than FasterTransformer's. GPUs here talk for free.
- The strategies are ours in every system, with long prompts in chunks beside the decodes, under a
  budget of tokens; the paper's systems computed prompts whole.
- Synthetic lengths are log-normal with the paper's means, not ShareGPT's own conversations; short
  answers weigh most in a mean of latency over length.
- FasterTransformer is a padded gang of as many requests as fit at the greatest length; all members
  have their answers when its longest is done.
- The paper reads its factors off curves at «similar latencies»; here one bound decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is simulated."""

    setup: Setup
    traffic: Traffic
    duration_s: float
    systems: Sequence[str]
    num_machines: int = 1
    router: str = "least-loaded"

    def serve(
        self, system: str, rate: float, bound: float, progress: Callable[[float], None]
    ) -> Outcome | None:
        """None where the mean normalised latency exceeds the bound."""
        arrivals = self.traffic.arrivals(rate, self.duration_s)
        if not arrivals:
            return None
        router = ROUTERS[self.router]()
        return Fleet(self.setup, SYSTEMS[system], arrivals, router, self.num_machines).run(
            bound, progress
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A system at a rate: what was asked for, or the highest that it sustains."""

    system: str
    rate: float
    """Requests per second; 0 where it sustains none."""
    outcome: Outcome | None


def replay(task: Task, rate: float, progress: Progress) -> list[Row]:
    """Every system at one rate, whatever becomes of it."""
    return [
        Row(
            name, rate, task.serve(name, rate, math.inf, lambda now, name=name: progress(name, now))
        )
        for name in task.systems
    ]


def compare(task: Task, bound: float, progress: Progress) -> list[Row]:
    """Every system at the highest rate at which the mean normalised latency is within the bound."""
    return [_knee(task, name, bound, progress) for name in task.systems]


def _knee(task: Task, name: str, bound: float, progress: Progress) -> Row:
    found = highest_rate(
        lambda rate: task.serve(
            name, rate, bound, lambda now: progress(f"{name} {rate:.3g}/s", now)
        ),
        start=float(task.num_machines),
    )
    return Row(name, 0.0, None) if found is None else Row(name, *found)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
