"""Time breakdown of a decode step: GPU time by kernel, host time by activity.

Building the engine takes about eight seconds and the prefill two; the rest is short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine.steady_decode import SteadyDecode, decoding_engine
from benchmarks.gpu.trace import Trace, busy_us, idle_us, record, short_name
from strategies.base import Strategy

BATCH, DRY_BATCH = 50, 3
NUM_STEPS, WARM_UP_STEPS = 20, 3
NUM_KERNELS = 25
"""Number of kernels with a row of their own; the others share one row."""
Part = tuple[str, str, float | None, float]
"""Place (GPU, host or step), activity, calls per step and µs per step."""


def run(bench: Bench) -> None:
    batch = DRY_BATCH if bench.is_dry else BATCH
    engine = decoding_engine(bench, batch)
    with SteadyDecode(bench, engine, batch) as decode:
        warm_up, steps = partial(decode.run, WARM_UP_STEPS), partial(decode.run, NUM_STEPS)
        warm_up()
        untraced_us = steps().seconds * 1e6
        with timed_methods(engine.strategy) as spent:
            trace, traced = record(bench.device, warm_up, lambda: (spent.clear(), steps())[1])
    step_us = traced.seconds * 1e6
    host_us = {name: seconds / NUM_STEPS * 1e6 for name, seconds in spent.items()}
    parts = [*gpu_parts(trace), *host_parts(trace, host_us, step_us)]
    parts += [("step", "traced", None, step_us), ("step", "untraced", None, untraced_us)]
    for place, activity, calls, us in parts:
        figures = {"us/step": round(us, 1), "share": round(us / step_us, 3)}
        bench.row(where=place, what=activity, calls=calls, **bench.timed(figures))


def gpu_parts(trace: Trace) -> Iterator[Part]:
    kernels = trace.by_name()
    for name, count, us in kernels[:NUM_KERNELS]:
        yield "GPU", short_name(name), round(count / NUM_STEPS, 2), us / NUM_STEPS
    if others := kernels[NUM_KERNELS:]:
        count, us = sum(count for _, count, _ in others), sum(us for _, _, us in others)
        yield "GPU", f"{len(others)} others", round(count / NUM_STEPS, 2), us / NUM_STEPS
    all_us = sum(us for _, _, us in kernels)
    yield "GPU", "sum of all", round(len(trace.work) / NUM_STEPS, 2), all_us / NUM_STEPS
    between_us, within_us = idle_us(trace.work, NUM_STEPS)
    yield "GPU", "busy", None, busy_us(trace.work) / NUM_STEPS
    yield "GPU", "idle between steps", None, between_us / NUM_STEPS
    yield "GPU", "idle within steps", None, within_us / NUM_STEPS


def host_parts(trace: Trace, host_us: dict[str, float], step_us: float) -> Iterator[Part]:
    """Yield the timed schedule and commit, the trace's CUDA calls, and the rest of the step."""
    host_us |= {
        "waiting for the GPU": trace.waiting_us / NUM_STEPS,
        "other CUDA calls": trace.calling_us / NUM_STEPS,
    }
    for name, us in host_us.items():
        yield "host", name, None, us
    yield "host", "inputs, model and sampling in Python", None, step_us - sum(host_us.values())


@contextmanager
def timed_methods(
    strategy: Strategy, clock: Callable[[], float] = time.perf_counter
) -> Iterator[dict[str, float]]:
    """Yield the seconds spent in `schedule` and `commit`; the caller may clear them in between."""
    spent: dict[str, float] = {}

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = clock()
            try:
                return method(*arguments)
            finally:
                spent[name] = spent.get(name, 0.0) + clock() - begin

        return call

    with (
        patch.object(strategy, "schedule", timed("schedule", strategy.schedule)),
        patch.object(strategy, "commit", timed("commit", strategy.commit)),
    ):
        yield spent
