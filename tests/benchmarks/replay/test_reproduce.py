"""Replays of random traffic, as the fuzz of the strategies makes it, are the same step for step."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter

import msgspec
import pytest

from benchmarks.replay.reproduce import Replay, reproduce
from benchmarks.replay.script import script_of
from engine.observers.frames import VERSION, AnyFrame, Header, Scheduled
from engine.observers.recorder import Recorder, link_tokens
from engine.observers.store import Recording
from strategies.base import Limits
from strategies.factory import StrategySettings
from tests.strategies.fuzz import ONE_GROUP, SEVERAL_GROUPS, Groups, Run, RunWithStates
from tests.strategies.speculation.test_speculation import DraftRun

NUM_SEEDS = {Run: 12, DraftRun: 5, RunWithStates: 5}
KINDS = {
    "requests", "answers", "aborts", "preemptions", "swaps", "lost steps", "lost submits",
    "no memory", "failed sequences",
}  # fmt: skip


def record(
    seed: int, counts: Counter[str], groups: Groups = ONE_GROUP, kind: type[Run] = Run
) -> Recording | None:
    """Record a run of the fuzz. None if it raises exceptions within the strategy."""
    run = kind(seed, counts, groups)
    if run.focus == "exceptions":
        return None
    frames: list[AnyFrame] = []
    run.engine.observer = Recorder(run.strategy, frames.extend)
    logging.disable()
    try:
        run.run()
    finally:
        logging.disable(logging.NOTSET)
    return Recording(header_of(run), through_bytes(frames))


def header_of(run: Run) -> Header:
    settings = dict(run.settings)
    limits = Limits(
        max_sequences=settings.pop("max_sequences"),
        max_step_tokens=settings.pop("max_step_tokens"),
    )
    return Header(
        VERSION,
        StrategySettings(batching=run.batching, limits=limits, **settings),
        "packed",
        run.engine.overlaps,
        run.strategy.extension is not None,
        link_tokens(run.strategy),
        weights_bytes=0,
        number=0,
        is_idle=True,
    )


def through_bytes(frames: list[AnyFrame]) -> list[AnyFrame]:
    decoder = msgspec.msgpack.Decoder(AnyFrame)
    return [decoder.decode(msgspec.msgpack.encode(frame)) for frame in frames]


@pytest.mark.parametrize("kind", NUM_SEEDS)
def test_random_traffic_is_reproduced_step_for_step(kind: type[Run]) -> None:
    """All strategies and cache groups; beams, adapters, images, grammars, cancels and faults."""
    counts: Counter[str] = Counter()
    strategies: Counter[str] = Counter()
    num_bytes = 0
    for index, groups in enumerate((ONE_GROUP, *SEVERAL_GROUPS.values())):
        for seed in range(index * NUM_SEEDS[kind], (index + 1) * NUM_SEEDS[kind]):
            recording = record(seed, counts, groups, kind)
            if recording is None:
                continue
            found = reproduce(recording)
            assert found.difference is None, f"seed {seed}, {groups}: {found.difference}"
            assert found.num_steps == sum(isinstance(f, Scheduled) for f in recording.frames)
            strategies[recording.header.settings.batching] += 1
            num_bytes += sum(4 + len(msgspec.msgpack.encode(f)) for f in recording.frames)
    assert kind is not Run or {name for name, count in counts.items() if count > 0} >= KINDS
    assert len(strategies) == 4
    assert num_bytes / counts["chunks"] < 60, num_bytes / counts["chunks"]


@pytest.mark.parametrize("kind", NUM_SEEDS)
def test_a_saved_replay_goes_on_alike(kind: type[Run]) -> None:
    for seed in range(4):
        recording = record(seed, Counter(), next(iter(SEVERAL_GROUPS.values())), kind)
        if recording is None:
            continue
        replay = Replay(recording, script_of(recording.frames, recording.header.link_tokens))
        assert replay.run_to(len(recording.frames) // 2) is None
        saved = replay.save()
        assert [saved.load().run(), replay.run(), saved.load().run()] == [None] * 3


def test_a_difference_names_its_step() -> None:
    recording = record(2, Counter())
    assert recording is not None
    steps = [i for i, frame in enumerate(recording.frames) if isinstance(frame, Scheduled)]
    index = steps[len(steps) // 2]
    frame = recording.frames[index]
    assert isinstance(frame, Scheduled)
    frames = [*recording.frames]
    frames[index] = msgspec.structs.replace(frame, num_free_blocks=frame.num_free_blocks + 1)
    difference = reproduce(dataclasses.replace(recording, frames=frames)).difference
    assert difference is not None
    assert difference.step == len(steps) // 2
    assert "num_free_blocks" in difference.recorded


def test_other_settings_do_not_reproduce() -> None:
    """The comparison sees what an option changes."""
    counts: Counter[str] = Counter()
    num_found = 0
    for seed in range(10):
        recording = record(seed, counts)
        if recording is None:
            continue
        settings = recording.header.settings
        limits = dataclasses.replace(settings.limits, max_step_tokens=2)
        changed = dataclasses.replace(settings, limits=limits)
        header = msgspec.structs.replace(recording.header, settings=changed)
        num_found += reproduce(dataclasses.replace(recording, header=header)).difference is not None
    assert num_found >= 5
