"""Measures what ranks send each other in a step: bytes, and the time that rank 0 spends on it.

The steps decode a batch on a CPU with gloo. The times include waiting for the other ranks, so they
also show how evenly the work is split. The bytes are those of one rank's tensors. NCCL would send
the same tensors, in the model's dtype.

    OMP_NUM_THREADS=1 python -m benchmarks.engine.ranks models/demo --ranks 2 --sequences 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.cpu.machine import describe_machine
from core.configuration.options import Options, make_options
from core.sampling import SamplingParams
from engine.build import build_rank_0
from engine.engine import Engine
from engine.phases import Phases
from engine.ranks.followers import Followers
from engine.ranks.group import ProcessGroup, SingleRank
from engine.ranks.leader import Leader
from engine.ranks.order_types import Order
from engine.ranks.shard import Shard

PROMPT_TOKENS = 64
CPU = torch.device("cpu")
TIMEOUT_S = 600
KINDS = ("orders", "inputs", "sums", "logits")


@dataclass(slots=True)
class Traffic:
    """Totals of one kind of message."""

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    @contextmanager
    def count(self, num_bytes: int = 0) -> Generator[None]:
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin
        self.calls += 1
        self.num_bytes += num_bytes


Totals = dict[str, Traffic]
"""The traffic of each kind of message in KINDS."""


class MeasuredGroup(ProcessGroup):
    """Counts what passes through a group."""

    def __init__(self, size: int, followers: Followers, totals: Totals) -> None:
        super().__init__(Shard(0, size), CPU, followers.address, TIMEOUT_S)
        self._totals = totals

    def sum(self, tensor: Tensor) -> Tensor:
        with self._totals["sums"].count(tensor.nbytes):
            return super().sum(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        with self._totals["logits"].count(tensor.nbytes):
            return super().gather(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        with self._totals["inputs"].count(tensor.nbytes):
            super().broadcast(tensor)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="directory of the model")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--sequences", type=int, default=8, help="batch size (default: 8)")
    parser.add_argument("--steps", type=int, default=100, help="number of steps (default: 100)")
    given = parser.parse_args(arguments)
    options = make_options({"device": "cpu", "batching": "paged"})
    alone = build_rank_0(given.model, options, CPU, Phases(), SingleRank(CPU), None)
    one_rank_s = median(run(alone, given.sequences, given.steps, lambda: None))
    totals = {kind: Traffic() for kind in KINDS}
    with ranked(given.model, options, given.ranks, totals) as engine:
        steps_s = run(engine, given.sequences, given.steps, lambda: restart(totals))
    print(report(totals, steps_s, one_rank_s, given.ranks, given.sequences))
    return 0


def restart(totals: Totals) -> None:
    totals.update({kind: Traffic() for kind in KINDS})


@contextmanager
def ranked(model_dir: Path, options: Options, size: int, totals: Totals) -> Generator[Engine]:
    """Yield an engine on `size` ranks, whose messages are counted in `totals`."""
    with ExitStack() as closing:
        followers = Followers(model_dir, options, size, CPU, lambda error: None)
        closing.callback(followers.close)
        followers.wait()
        group = MeasuredGroup(size, followers, totals)
        closing.callback(group.close)

        def send(order: Order) -> None:
            traffic = totals["orders"]
            with traffic.count():
                traffic.num_bytes += followers.send(order)

        leader = Leader(send, followers.raising_cause, group)
        yield build_rank_0(model_dir, options, CPU, Phases(), group, leader)


def run(engine: Engine, count: int, num_steps: int, begin: Callable[[], None]) -> list[float]:
    """Return the seconds of each decode step of `count` sequences.

    begin: called after the prefill, before the first timed step.
    """
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2, ignore_eos=True)
    for index in range(count):
        engine.add([1 + index] * PROMPT_TOKENS, params, time.monotonic())
    while any(
        group.sequences[0].num_generated_tokens == 0 for group in engine.strategy.running
    ) or (engine.strategy.waiting):
        engine.step(time.monotonic())
    begin()
    seconds: list[float] = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step(time.monotonic())
        seconds.append(time.perf_counter() - started)
    return seconds


def report(
    totals: Totals, steps_s: list[float], one_rank_s: float, ranks: int, sequences: int
) -> str:
    lines = [
        describe_machine(),
        f"decode steps of {sequences} sequences on {ranks} ranks: {1e3 * median(steps_s):.2f} ms "
        f"(median of {len(steps_s)}); on one rank {1e3 * one_rank_s:.2f} ms",
        f"{'a step':<8} {'calls':>6} {'bytes':>10} {'us':>9}",
    ]
    lines += [
        f"{kind:<8} {traffic.calls / len(steps_s):>6.1f} "
        f"{traffic.num_bytes / len(steps_s):>10,.0f} {1e6 * traffic.seconds / len(steps_s):>9,.0f}"
        for kind, traffic in totals.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
