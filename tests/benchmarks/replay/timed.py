"""Recordings of engines whose steps take a known time."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgspec

from core.sampling import SamplingParams
from engine.engine import Engine
from engine.observers.recorder import Recorder
from engine.observers.store import RecordingWriter
from strategies.base import Limits
from tests.engine.observers.test_store import HEADER
from tests.engine.serve.serving import FACTS
from tests.strategies.fakes import FakeExecutor, strategy_of

OVERHEAD_S, TOKEN_S = 0.02, 0.003


class Clock:
    """Steps take the time that the test's own cost model says."""

    def __init__(self) -> None:
        self.now = 0.0

    def ns(self) -> int:
        return round(self.now * 1e9)


class TimedExecutor(FakeExecutor):
    def __init__(self, clock: Clock, slowness: float) -> None:
        super().__init__(4)
        self._clock = clock
        self._slowness = slowness

    def run(self, plan):
        self._clock.now += self._slowness * (OVERHEAD_S + TOKEN_S * plan.num_tokens)
        return super().run(plan)


def record(
    folder: Path,
    *,
    max_sequences: int = 2,
    max_step_tokens: int = 8,
    num_blocks: int = 8,
    num_requests: int = 60,
    slowness: float = 1.0,
    seed: int = 0,
) -> None:
    """Record requests that arrive in 8 seconds. slowness: a factor of the time of each step."""
    limits = Limits(max_sequences=max_sequences, max_step_tokens=max_step_tokens)
    settings = dataclasses.replace(HEADER.settings, limits=limits, num_blocks=num_blocks)
    clock, rng = Clock(), random.Random(seed)
    strategy = strategy_of(
        "paged", num_blocks=num_blocks, max_model_len=16, max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
    )  # fmt: skip
    engine = Engine(strategy, TimedExecutor(clock, slowness), FACTS)
    writer = RecordingWriter(
        folder, msgspec.structs.replace(HEADER, settings=settings), 2**20, 3600
    )
    engine.observer = Recorder(
        strategy,
        lambda frames: writer.write(frames, is_idle=not engine.has_work()),
        clock_ns=clock.ns,
    )
    arrivals = sorted(rng.uniform(0, 8) for _ in range(num_requests))
    while arrivals or engine.has_work():
        if not engine.has_work():
            clock.now = max(clock.now, arrivals[0])
        while arrivals and arrivals[0] <= clock.now:
            prompt = [rng.randrange(1, 20) for _ in range(rng.randint(1, 9))]
            params = SamplingParams(max_tokens=rng.randint(1, 6), ignore_eos=True)
            engine.add(prompt, params, arrivals.pop(0))
        engine.step(clock.now)
    writer.close()
