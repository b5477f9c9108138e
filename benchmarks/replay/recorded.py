"""What a recording itself says of its requests and steps."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.replay.figures import Tally
from benchmarks.replay.script import script_of
from engine.observers.frames import AnyFrame, Arrived, Scheduled
from engine.observers.store import Recording


def recorded_tally(recording: Recording) -> Tally:
    """Return what the requests of a recording got, and when."""
    tally = Tally(frame for frame in recording.frames if isinstance(frame, Arrived))
    script_of(recording.frames, recording.header.link_tokens, tally.add)
    steps = [frame for frame in recording.frames if isinstance(frame, Scheduled)]
    tally.num_steps = len(steps)
    counts = _num_rows(steps)
    tally.num_step_sequences, tally.most_sequences = sum(counts), max(counts, default=0)
    if steps:
        tally.num_preemptions = steps[-1].num_preemptions - steps[0].num_preemptions
        num_blocks = recording.header.settings.num_blocks
        tally.most_blocks = num_blocks - min(step.num_free_blocks for step in steps)
    return tally


def _num_rows(steps: Sequence[Scheduled]) -> list[int]:
    counts: list[int] = []
    for step in steps:
        counts.append(counts[-1] if step.ids is None else len(step.ids))
    return counts


def title(recording: Recording) -> str:
    """Return how much was recorded, and with which settings."""
    settings, frames = recording.header.settings, recording.frames
    return (
        f"{_count(frames, Arrived)} requests in {_count(frames, Scheduled)} steps of "
        f"{settings.batching}, with up to {settings.limits.max_sequences} sequences and "
        f"{settings.limits.max_step_tokens} tokens a step, {settings.num_blocks} blocks of "
        f"{settings.layout.block_size} tokens"
    )


def _count(frames: Sequence[AnyFrame], kind: type[AnyFrame]) -> int:
    return sum(isinstance(frame, kind) for frame in frames)
