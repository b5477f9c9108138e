"""End-to-end load of 50 concurrent clients on each strategy and on transformers.

The load follows AWS's article (benchmarks.load.workload). Each case runs in its own process, so
that it starts with empty GPU memory. Building the engine and warming up take about eight seconds
of its time budget (see benchmarks.gpu.sections) on an H200 with 13.5 GB of weights. In the
remaining time, but for at least SERVED_S, the case serves as much of the load as it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine import generate
from benchmarks.gpu.engine.engines import dtype, make_engine, make_model, shape_config
from benchmarks.gpu.engine.generate import Serve
from benchmarks.gpu.shapes import kv_bytes_per_token
from benchmarks.load.closed_loop import ClosedLoop
from benchmarks.load.workload import DRY_LOAD, FULL_LOAD, Load
from core.configuration.record import Value

WARM_UP_TOKENS = 4
WARM_UP_SEED = 1
"""With the load's own seed, prefix caching would find the warm-up's prompts in the load."""
SERVED_S = 3
"""What a case serves at least: the first one on a machine compiles kernels for longer than its time
budget."""
PEERS: dict[str, Callable[[Any, int], AbstractContextManager[Serve]]] = {
    "generate": generate.padded_batches,
    "generate_batch": generate.generate_batch,
}


def run(bench: Bench, case: str) -> None:
    if case in PEERS:
        bench.attempt(case, lambda: _run_peer(bench, case))
    else:
        run_engine(bench, case, batching=case)


def load_of(bench: Bench) -> Load:
    return DRY_LOAD if bench.is_dry else FULL_LOAD


def run_engine(bench: Bench, case: str, **options: Value) -> None:
    """Serve the load on an engine with these options and report one row."""
    load, started = load_of(bench), time.perf_counter()
    engine = make_engine(
        bench,
        max_model_len=load.max_model_len,
        max_rolling_batch_size=load.clients,
        batch_size=load.clients,
        **options,
    )
    loop = ClosedLoop(engine, load.clients)
    measure(bench, case, loop.run, started, num_warm_up=engine.facts.max_sequences)


def _run_peer(bench: Bench, case: str) -> None:
    clients, started = load_of(bench).clients, time.perf_counter()
    with PEERS[case](make_model(bench), clients) as serve:
        measure(bench, case, serve, started, num_warm_up=clients)


def measure(bench: Bench, case: str, serve: Serve, started: float, *, num_warm_up: int) -> None:
    """Warm up with `num_warm_up` short requests, serve the load, and report one row.

    started: time when building the engine began.
    """
    load, config = load_of(bench), shape_config(bench)
    built = time.perf_counter()
    warm_up = load.requests(config["vocab_size"], max_tokens=WARM_UP_TOKENS, seed=WARM_UP_SEED)
    serve(islice(warm_up, num_warm_up), float("inf"))
    warm = time.perf_counter()
    journal = serve(list(load.requests(config["vocab_size"])), max(SERVED_S, bench.seconds_left))
    if not any(record.arrivals for record in journal.records):
        bench.note(f"{case}: time was up before the first token")
        return
    memory = journal.memory(kv_bytes_per_token(config, dtype(bench).itemsize))
    set_up = {"build": round(built - started, 1), "warm": round(warm - built, 1)}
    bench.row(
        case=case,
        **bench.timed(journal.figures()),
        **{"KV GiB": memory, "set-up s": bench.timed(set_up)},
        preemptions=journal.num_preemptions,
        steps=len(journal.held) or None,
    )
