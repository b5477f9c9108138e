"""Decode steps of the engine against the minimum time to read their bytes.

Building the engine takes about eight seconds, and prefilling the largest batch takes most of the
remaining time budget, so the most important batch size comes first.
"""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine.engines import dtype, shape_config
from benchmarks.gpu.engine.steady_decode import SteadyDecode, decoding_engine, has_room_for
from benchmarks.gpu.shapes import decode_bytes, kv_bytes_per_token
from benchmarks.gpu.trace import busy_us, record
from benchmarks.load.journal import GIB, significant
from engine.engine import Engine

BATCHES = (50, 1, 16, 128)
TIMED_STEPS, TRACED_STEPS, WARM_UP_STEPS = 40, 10, 3


def run(bench: Bench) -> None:
    batches = (3, 1) if bench.is_dry else BATCHES
    engine = decoding_engine(bench, max(batches))
    for batch in batches:
        if bench.has_no_time_for(f"batch {batch} and the remaining cases"):
            return
        if not has_room_for(bench, engine, batch):
            bench.note(f"batch {batch} skipped: its KV cache does not fit")
            continue
        bench.attempt(f"batch {batch}", partial(_row, bench, engine, batch))


def _row(bench: Bench, engine: Engine, batch: int) -> None:
    config, itemsize = shape_config(bench), dtype(bench).itemsize
    with SteadyDecode(bench, engine, batch) as decode:
        decode.run(WARM_UP_STEPS)
        steps = decode.run(TIMED_STEPS)
        trace, _ = record(
            bench.device,
            partial(decode.run, WARM_UP_STEPS),
            partial(decode.run, TRACED_STEPS),
        )
    kv_bytes = steps.kv_tokens * kv_bytes_per_token(config, itemsize)
    num_bytes = decode_bytes(config, engine.facts.weights_bytes, steps.kv_tokens, itemsize)
    bench.row(
        batch=batch,
        context=round(steps.kv_tokens / batch),
        bytes=round(num_bytes),
        **{
            "weights GiB": significant((num_bytes - kv_bytes) / GIB),
            "KV GiB": significant(kv_bytes / GIB),
            "step us": bench.timed(round(steps.seconds * 1e6, 1)),
            "GPU us": bench.timed(round(busy_us(trace.work) / TRACED_STEPS, 1)),
        },
    )
