"""Measures what the live page costs the engine: decode steps with and without a watching client.

Intervals of the same running batch alternate between the two, and each is compared with its
neighbour. Wall time and CPU time are compared; other processes do not change the CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks.engine.watching models/demo --sequences 8
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.cpu.machine import describe_machine
from core.configuration.options import make_options
from core.sampling import SamplingParams
from engine.build import build_engine
from engine.engine import Engine
from engine.serve.connection import Connection
from engine.serve.watchers import Watchers

INTERVAL_S = 1.0
PROMPT_TOKENS = 64
CLIENT = b"page"
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "CPU": time.process_time}


@dataclass(frozen=True, slots=True)
class Interval:
    """Means over the steps of one interval."""

    step_s: dict[str, float]
    """Seconds per step by each of CLOCKS."""
    snapshot_s: float
    """CPU time per step that the loop's thread takes to make, encode and queue snapshots."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.watching",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="directory of the model")
    parser.add_argument("--sequences", type=int, default=8, help="batch size (default: 8)")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of intervals (default: 30)")
    options = parser.parse_args(arguments)
    engine = build_engine(options.model, make_options({"batching": "paged"}))
    with tempfile.TemporaryDirectory() as directory, Connection(f"ipc://{directory}/e") as wire:
        watchers = Watchers(engine.strategy, wire.send, lambda _: None)
        loop = Loop(engine, watchers, options.sequences)
        pairs = [measure_pair(loop, number % 2 == 0) for number in range(options.pairs)]
    print(report(pairs, options.sequences))
    return 0


class Loop:
    """The server's loop, with a batch that never empties."""

    def __init__(self, engine: Engine, watchers: Watchers, num_sequences: int) -> None:
        self.watchers = watchers
        self._engine = engine
        self._num_sequences = num_sequences
        room = engine.facts.max_model_len - PROMPT_TOKENS
        self._params = SamplingParams(max_tokens=room, ignore_eos=True)

    def run(self) -> Interval:
        """Run steps for INTERVAL_S."""
        before = {name: clock() for name, clock in CLOCKS.items()}
        num_steps, snapshot_s = 0, 0.0
        while time.perf_counter() < before["wall"] + INTERVAL_S:
            while self._engine.strategy.num_running + len(self._engine.strategy.waiting) < (
                self._num_sequences
            ):
                prompt = [2 + self._engine.num_steps % 50] * PROMPT_TOKENS
                self._engine.add(prompt, self._params, time.monotonic())
            self._engine.step(time.monotonic())
            if self.watchers:
                started = time.thread_time()
                self.watchers.update()
                snapshot_s += time.thread_time() - started
            num_steps += 1
        spent = {name: (clock() - before[name]) / num_steps for name, clock in CLOCKS.items()}
        return Interval(spent, snapshot_s / num_steps)


def measure_pair(loop: Loop, alone_first: bool) -> tuple[Interval, Interval]:
    """Return an interval without a client that watches, and one with it.

    The order varies, because steps take longer as the sequences grow.
    """

    def watched() -> Interval:
        loop.watchers.add(CLIENT, 2 * INTERVAL_S)
        interval = loop.run()
        loop.watchers.remove(CLIENT)
        return interval

    if alone_first:
        return loop.run(), watched()
    second = watched()
    return loop.run(), second


def report(pairs: list[tuple[Interval, Interval]], num_sequences: int) -> str:
    lines = [
        f"{describe_machine()}; {num_sequences} sequences, {len(pairs)} pairs of {INTERVAL_S:g} s"
    ]
    for clock in CLOCKS:
        alone = median(first.step_s[clock] for first, _ in pairs)
        ratios = sorted(second.step_s[clock] / first.step_s[clock] for first, second in pairs)
        low, high = ratios[len(ratios) // 4], ratios[len(ratios) * 3 // 4]
        lines.append(
            f"{clock} time per step: {alone * 1e3:.3f} ms alone, watched {median(ratios) - 1:+.2%} "
            f"(quartiles {low - 1:+.2%} to {high - 1:+.2%})"
        )
    share = median(watched.snapshot_s / watched.step_s["CPU"] for _, watched in pairs)
    lines.append(f"snapshots take {share:.2%} of the CPU time")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
