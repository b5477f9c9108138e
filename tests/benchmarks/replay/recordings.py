"""Recordings of an engine whose steps take a known time.

python -m tests.benchmarks.replay.recordings DIR    # writes one for the page
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
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
from strategies.beam_group import BeamSearches
from strategies.factory import StrategySettings, make_strategy
from tests.benchmarks.replay.timed import Clock, TimedExecutor
from tests.engine.serve.serving import FACTS


class Ask(NamedTuple):
    """A request of a test."""

    at: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    params: Mapping[str, int] = {}
    """Further sampling parameters."""
    stays_s: float | None = None
    """How long the client waits; None: until the answer ends."""


def record(
    batching: Batching,
    asks: Iterable[Ask],
    *,
    num_blocks: int = 64,
    max_sequences: int = 4,
    max_step_tokens: int = 16,
    max_delay_s: float = 0.0,
    overlaps: bool = False,
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
    features = (BeamSearches(),)
    engine = Engine(
        strategy, TimedExecutor(clock, 1.0), FACTS, overlaps=overlaps, features=features
    )
    engine.observer = Recorder(strategy, frames.extend, clock_ns=clock.ns)
    waiting, rng = sorted(asks, key=lambda ask: ask.at), random.Random(0)
    leaving: list[tuple[float, int]] = []
    while waiting or engine.has_work():
        if not engine.has_work():
            clock.now = max(clock.now, waiting[0].at)
        while waiting and waiting[0].at <= clock.now:
            ask = waiting.pop(0)
            prompt = [rng.randrange(1, 20) for _ in range(ask.num_prompt_tokens)]
            params = SamplingParams(
                max_tokens=ask.max_tokens, priority=ask.priority, ignore_eos=True, **ask.params
            )
            id = engine.add(prompt, params, ask.at)
            if ask.stays_s is not None:
                leaving.append((ask.at + ask.stays_s, id))
        for at, id in [each for each in leaving if each[0] <= clock.now]:
            engine.abort(id, None, "left")
            leaving.remove((at, id))
        num_steps, in_flight = engine.num_steps, engine.in_flight
        engine.step(clock.now)
        if engine.num_steps == num_steps and in_flight is None and engine.has_work():
            times = [waiting[0].at] if waiting else []
            wake_at = engine.wake_at()
            clock.now = min(times if wake_at is None else [*times, wake_at])
    header = Header(VERSION, settings, "packed", overlaps, False, 4, 0, number=0, is_idle=True)
    return Recording(header, frames)


def random_asks(seed: int, count: int, seconds: float) -> list[Ask]:
    rng = random.Random(seed)
    return [
        Ask(rng.uniform(0, seconds), rng.randint(1, 14), rng.randint(2, 14)) for _ in range(count)
    ]


def mixed_asks(seed: int, count: int, seconds: float) -> list[Ask]:
    """Also requests with several samples, searches, priorities, and clients that leave."""
    rng, kinds = random.Random(seed), ({}, {}, {"n": 2}, {"n": 2, "num_beams": 2, "temperature": 0})
    return [
        ask._replace(
            priority=rng.randrange(2),
            params=rng.choice(kinds),
            stays_s=rng.choice((None, None, rng.uniform(0, 1))),
        )
        for ask in random_asks(seed, count, seconds)
    ]


def main() -> None:
    recording = record("paged", random_asks(seed=3, count=40, seconds=4), num_blocks=12)
    writer = RecordingWriter(Path(sys.argv[1]), recording.header, 2**20, 3600)
    writer.write(recording.frames, is_idle=True)
    writer.close()


if __name__ == "__main__":
    main()
