"""The load of `serve` with a tenth of the KV cache, where reservation limits the batch size."""

from __future__ import annotations

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine.serve import load_of, run_engine
from core.configuration.options import Options
from core.configuration.record import Value

CASES: dict[str, dict[str, Value]] = {
    "paged": {"batching": "paged"},
    "continuous-oracle": {"batching": "continuous", "kv_reservation": "oracle"},
    "continuous-max": {"batching": "continuous", "kv_reservation": "max"},
}


def run(bench: Bench, case: str) -> None:
    num_blocks = load_of(bench).pool_blocks(Options().memory.block_size) // 10
    run_engine(bench, case, num_kv_blocks=num_blocks, **CASES[case])
