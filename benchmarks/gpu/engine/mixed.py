"""Times steps with decodes and a prompt on a 0.6B model, with and without CUDA graphs.

Kernels of a small model take less time than their launches, so without a graph the GPU idles. Both
variants run on one engine, one after the other. Building it takes about fifteen seconds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine.engines import make_engine
from benchmarks.gpu.engine.steady_decode import SteadyDecode, has_room_for, lengths
from benchmarks.gpu.trace import busy_us, record
from engine.engine import Engine
from engine.step.packed_executor import PackedExecutor

SHAPE = "qwen3-0.6b"
CASES = {50: (64, 256, 1024), 8: (64,), 200: (256,)}
"""Lengths of the prompt, by number of decodes."""
DRY_CASES = {2: (5,)}
TIMED_STEPS, TRACED_STEPS, WARM_UP_STEPS = 20, 10, 3


def run(bench: Bench) -> None:
    bench.shape = SHAPE
    cases = DRY_CASES if bench.is_dry else CASES
    prompt_tokens = sorted({length for prompts in cases.values() for length in prompts})
    engine = make_engine(
        bench,
        batching="paged",
        max_rolling_batch_size=256,
        max_model_len=sum(lengths(bench)),
        enable_prefix_caching=False,
        cuda_graph_sizes=",".join(map(str, prompt_tokens)),
    )
    for num_decodes, prompts in cases.items():
        if bench.has_no_time_for(f"{num_decodes} decodes and the remaining cases"):
            return
        if not has_room_for(bench, engine, num_decodes):
            bench.note(f"{num_decodes} decodes skipped: their KV cache does not fit")
            continue
        bench.attempt(f"{num_decodes} decodes", partial(_rows, bench, engine, num_decodes, prompts))


def _rows(bench: Bench, engine: Engine, num_decodes: int, prompts: tuple[int, ...]) -> None:
    with SteadyDecode(bench, engine, num_decodes) as decode:
        for prompt_tokens in prompts:
            times_us = {"graph": _measure(bench, decode, prompt_tokens)}
            with without_graphs(engine):
                times_us["eager"] = _measure(bench, decode, prompt_tokens)
            idle = {
                name: round(max(0.0, 1 - busy / step), 3) for name, (step, busy) in times_us.items()
            }
            bench.row(
                decodes=num_decodes,
                **{"prompt tokens": prompt_tokens},
                us=bench.timed({name: round(step, 1) for name, (step, _) in times_us.items()}),
                **{"GPU idle": bench.timed(idle)},
            )


def _measure(bench: Bench, decode: SteadyDecode, prompt_tokens: int) -> tuple[float, float]:
    """Return a step's duration and the time that the GPU is busy in it, in µs."""
    run = partial(decode.run, prompt_tokens=prompt_tokens)
    run(WARM_UP_STEPS)
    step_us = run(TIMED_STEPS).seconds * 1e6
    trace, _ = record(bench.device, partial(run, WARM_UP_STEPS), partial(run, TRACED_STEPS))
    return step_us, busy_us(trace.work) / TRACED_STEPS


def without_graphs(engine: Engine) -> AbstractContextManager[object]:
    """Return a context in which the engine uses no CUDA graphs."""
    executor = engine.executor
    assert isinstance(executor, PackedExecutor)
    passes = executor.passes
    return nullcontext() if passes.graphs is None else patch.object(passes, "graphs", None)
