"""Recordings of an engine whose steps take a known time.

python -m tests.benchmarks.replay.recordings DIR    # writes one for the page
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from core.configuration.kv_layout import KVLayout
from core.configuration.strategy_table import Batching
from core.sampling import SamplingParams
from engine.engine import Engine
from engine.observers.frames import VERSION, AnyFrame, Header
from engine.observers.recorder import Recorder
from engine.observers.store import Recording, RecordingWriter
from strategies.base import Limits
from strategies.factory import StrategySettings, make_strategy
from tests.benchmarks.replay.timed import Clock, TimedExecutor
from tests.engine.serve.serving import FACTS


class Ask(NamedTuple):
    """A request of a test."""

    at: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0


def record(
    batching: Batching,
    asks: Iterable[Ask],
    *,
    num_blocks: int = 64,
    max_sequences: int = 4,
    max_step_tokens: int = 16,
    max_delay_s: float = 0.0,
) -> Recording:
    """Return the recording of an engine whose steps take a known time. Ids: the order of asks."""
    settings = StrategySettings(
        batching=batching,
        num_blocks=num_blocks,
        layout=KVLayout.uniform(4),
        max_model_len=32,
        limits=Limits(max_sequences=max_sequences, max_step_tokens=max_step_tokens),
        max_delay_s=max_delay_s,
        kv_reservation="oracle",
        enable_prefix_caching=True,
        preemption_mode="recompute",
        num_swap_blocks=0,
    )
    strategy, clock, frames = make_strategy(settings), Clock(), list[AnyFrame]()
    engine = Engine(strategy, TimedExecutor(clock, 1.0), FACTS)
    engine.observer = Recorder(strategy, frames.extend, clock_ns=clock.ns)
    waiting, rng = sorted(asks, key=lambda ask: ask.at), random.Random(0)
    while waiting or engine.has_work():
        if not engine.has_work():
            clock.now = max(clock.now, waiting[0].at)
        while waiting and waiting[0].at <= clock.now:
            ask = waiting.pop(0)
            prompt = [rng.randrange(1, 20) for _ in range(ask.num_prompt_tokens)]
            params = SamplingParams(
                max_tokens=ask.max_tokens, priority=ask.priority, ignore_eos=True
            )
            engine.add(prompt, params, ask.at)
        before = clock.now
        engine.step(clock.now)
        if clock.now == before:  # nothing to compute
            times = [waiting[0].at] if waiting else []
            wake_at = engine.wake_at()
            clock.now = min(times if wake_at is None else [*times, wake_at])
    header = Header(VERSION, settings, "packed", False, False, 4, 0, number=0, is_idle=True)
    return Recording(header, frames)


def random_asks(seed: int, count: int, seconds: float) -> list[Ask]:
    rng = random.Random(seed)
    return [
        Ask(rng.uniform(0, seconds), rng.randint(1, 14), rng.randint(2, 14)) for _ in range(count)
    ]


def main() -> None:
    recording = record("paged", random_asks(seed=3, count=40, seconds=4), num_blocks=12)
    writer = RecordingWriter(Path(sys.argv[1]), recording.header, 2**20, 3600)
    writer.write(recording.frames, is_idle=True)
    writer.close()


if __name__ == "__main__":
    main()
