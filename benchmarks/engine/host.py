"""Times the host's work in a decode step: scheduling, building the inputs and committing.

The paged strategy uses its real block manager, and the input builder makes the step's tensors on
the CPU. No model runs: every step samples the same token. While a GPU computes a step, the host has
to finish this work for the next one, so it must take less time than the forward pass.

Example: OMP_NUM_THREADS=1 python -m benchmarks.engine.host --sequences 256
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch

from core.configuration.kv_layout import KVLayout
from core.plan import StepPlan, StepResult
from core.request import Request
from core.sampling import Sampled, SamplingParams
from engine.staging import Staging
from engine.step.step_inputs import InputBuilder
from strategies.base import Limits
from strategies.memory.blocks import PagedMemory
from strategies.paged import PagedStrategy

BLOCK_SIZE = 16
PROMPT_TOKENS = 500
WARM_UP = 3
"""Untimed decode steps after the prefill."""
PARTS = ("schedule", "inputs", "commit")
SAMPLED = Sampled((7,), (-1.0,))

Times = dict[str, list[float]]
"""Seconds of each step, by part."""


def measure(num_sequences: int, num_steps: int) -> Times:
    """Run `num_steps` steps in which all sequences decode. Return the times of each part."""
    length = PROMPT_TOKENS + WARM_UP + num_steps + 1
    blocks_per_sequence = -(-length // BLOCK_SIZE)
    memory = PagedMemory(num_sequences * (blocks_per_sequence + 1), KVLayout.uniform(BLOCK_SIZE))
    limits = Limits(max_sequences=num_sequences, max_step_tokens=num_sequences * PROMPT_TOKENS)
    strategy = PagedStrategy(memory, limits)
    inputs = InputBuilder(memory.layout.groups, Staging(torch.device("cpu")))
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    for id in range(num_sequences):
        strategy.add(Request(id, [id] * PROMPT_TOKENS, params))
    times: Times = defaultdict(list)
    for step in range(1 + WARM_UP + num_steps):
        seconds = run_step(strategy, inputs)
        if step > WARM_UP:
            for part, spent in zip(PARTS, seconds, strict=True):
                times[part].append(spent)
    return times


def run_step(strategy: PagedStrategy, inputs: InputBuilder) -> tuple[float, float, float]:
    """Run one step. Return the seconds of each of `PARTS`."""
    start = time.perf_counter()
    plan = strategy.schedule(0.0)
    assert plan is not None
    scheduled = time.perf_counter()
    inputs.build(plan)
    built = time.perf_counter()
    result = _sample(plan)
    sampled = time.perf_counter()
    strategy.commit(plan, result)
    return scheduled - start, built - scheduled, time.perf_counter() - sampled


def _sample(plan: StepPlan) -> StepResult:
    return {chunk.sequence.id: SAMPLED for chunk in plan.chunks}


def report(times_by_size: dict[int, Times]) -> str:
    lines = ["median ms per step (90th percentile)", ""]
    lines.append(f"{'sequences':>9}" + "".join(f"{part:>18}" for part in (*PARTS, "all")))
    for size, times in times_by_size.items():
        totals = [sum(parts) for parts in zip(*(times[part] for part in PARTS), strict=True)]
        columns = [_column(seconds) for seconds in (*(times[part] for part in PARTS), totals)]
        lines.append(f"{size:>9}" + "".join(f"{column:>18}" for column in columns))
    return "\n".join(lines)


def _column(seconds: Sequence[float]) -> str:
    slow = sorted(seconds)[len(seconds) * 9 // 10]
    return f"{median(seconds) * 1e3:.2f} ({slow * 1e3:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        default=[50, 256, 1024],
        help="numbers of decoding sequences (default: 50 256 1024)",
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="number of timed steps (default: 100)"
    )
    options = parser.parse_args(arguments)
    print(report({size: measure(size, options.steps) for size in options.sequences}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
