"""Time a decode step on a CPU beside a copy of memory, in turns.

A step of one sequence reads each weight once, and reads and writes the sequence's states: that many
bytes must move. The rate at which they do is compared with the rate of a copy in the same process,
which counts what it reads and what it writes. Weights are random; prompts have 64 tokens.

    OMP_NUM_THREADS=1 python -m benchmarks.engine.decode --shape qwen3.5-0.8b lfm2-1.2b
    python -m benchmarks.engine.decode --shape llama-88m --sequences 1 --dtype fp32 --quantize int8
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cpu.shapes import SHAPES
from core.sampling import SamplingParams
from engine.attention.states import StatePool
from engine.engine import Engine
from engine.offline.llm import LLM

COPIED = 256 * 2**20
"""Bytes: many times as many as caches hold."""
NUM_PROMPT = 64
WARM_UP = 4
SIZES = {"fp32": 4, "bf16": 2}
"""Bytes of a number."""


def clocks() -> tuple[float, float]:
    """Return the wall clock and the CPU time of this process, all threads."""
    return time.perf_counter(), time.process_time()


def copy_rates(source: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """Return the bytes that a copy moves in a second of the wall clock, and of CPU time."""
    before = clocks()
    target.copy_(source)
    wall, cpu = (end - begin for begin, end in zip(before, clocks(), strict=True))
    return 2 * source.nbytes / wall, 2 * source.nbytes / cpu


def moved_bytes(llm: LLM, shape: str, num_sequences: int, dtype: str) -> int:
    """Return the bytes that a decode step must move, without K and V.

    Of the embedding it reads a row for each token; the head is beside it.
    """
    passes: Any = llm.llm_engine.executor
    states: StatePool | None = passes.passes.cache.states
    embedding = SHAPES[shape]["vocab_size"] * SHAPES[shape]["hidden_size"] * SIZES[dtype]
    num_bytes = llm.facts.weights_bytes - embedding
    return num_bytes + (0 if states is None else 2 * states.rows.shape[1] * num_sequences)


def steps(engine: Engine, num_sequences: int, count: int) -> list[tuple[float, float]]:
    """Return the seconds of decode steps, of the wall clock and of CPU time."""
    params = SamplingParams(temperature=0, max_tokens=count + WARM_UP + 1, ignore_eos=True)
    for id in range(num_sequences):
        engine.add([id + 10] * NUM_PROMPT, params, time.monotonic())
    spent: list[tuple[float, float]] = []
    while engine.has_work():
        before = clocks()
        engine.step(time.monotonic())
        wall, cpu = (end - begin for begin, end in zip(before, clocks(), strict=True))
        spent.append((wall, cpu))
    return spent[-count:]


def measure(
    shape: str, num_sequences: int, dtype: str, quantize: str | None, num_rounds: int, count: int
) -> str:
    """Return a row of the table: medians over rounds of `count` steps, each after a copy."""
    shares: list[tuple[float, float]] = []
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        with LLM(
            folder,
            dtype=dtype,
            quantize=quantize,
            load_format="dummy",
            max_model_len=512,
            max_rolling_batch_size=num_sequences,
        ) as llm:
            source = torch.ones(COPIED, dtype=torch.uint8)
            target = torch.empty_like(source)
            copy_rates(source, target)
            num_bytes = moved_bytes(llm, shape, num_sequences, dtype)
            for _ in range(num_rounds):
                copies = copy_rates(source, target)
                spent = steps(llm.llm_engine, num_sequences, count)
                wall, cpu = (median(side) for side in zip(*spent, strict=True))
                seconds.append(wall)
                shares.append((num_bytes / wall / copies[0], num_bytes / cpu / copies[1]))
    of_wall, of_cpu = (median(side) for side in zip(*shares, strict=True))
    return (
        f"| {shape} | {num_sequences} | {num_bytes / 1e6:,.1f} | {median(seconds) * 1e3:,.1f} | "
        f"{of_wall:.0%} | {of_cpu:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen3.5-0.8b", "lfm2-1.2b"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dtype", choices=SIZES, default="bf16")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="of a round (default: %(default)s)")
    given = parser.parse_args()
    print("| shape | sequences | MB that must move | ms | share of a copy | by CPU time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in given.shape:
        for num_sequences in given.sequences:
            work = shape, num_sequences, given.dtype, given.quantize
            print(measure(*work, given.rounds, given.steps), flush=True)


if __name__ == "__main__":
    main()
