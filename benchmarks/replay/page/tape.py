"""A recording that is replayed to any of its moments."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from benchmarks.replay.page.rows import Row, Rows
from benchmarks.replay.reproduce import Difference, Replay, SavedReplay
from benchmarks.replay.script import script_of
from core.protocol.snapshot import Snapshot
from core.protocol.stats import Receipt
from engine.executor import Observer
from engine.observers.frames import Aborted, AnyFrame, Arrived, Scheduled, Waited
from engine.observers.ledger import Ledger
from engine.observers.store import Recording
from engine.serve.watchers import take_snapshot

NUM_CHECKPOINTS = 48
LEAST_STEPS = 100
"""Between two checkpoints."""


class Tape:
    """Replays the whole recording once, and keeps states to go on from. Not thread-safe."""

    def __init__(self, recording: Recording) -> None:
        """Raises ValueError if it cannot be replayed."""
        if not recording.is_whole and recording.header.settings.enable_prefix_caching:
            raise ValueError(
                "the beginning of the recording was deleted, so what was cached then is unknown; "
                "raise option.record_max_mib or record_max_hours"
            )
        self.recording = recording
        frames = recording.frames
        self.script = script_of(frames, recording.header.link_tokens)
        self.times = list(accumulate(map(_time_of, frames), max))
        """When each frame was recorded; that of a result, when its step began. Seconds."""
        self.steps = [i for i, frame in enumerate(frames) if isinstance(frame, Scheduled | Waited)]
        """The indexes of the frames that begin a step."""
        if not self.steps:
            raise ValueError("the recording has no steps")
        replay = Replay(recording, self.script, self._watch)
        self._checkpoints: list[SavedReplay] = []
        self.difference = self._run(replay)
        """Where the replay did something else. The tape ends there."""
        self.num_frames = replay.index
        if self.difference is not None:
            self.num_frames = max(index for index in self.steps if index < replay.index)
            self.steps = [index for index in self.steps if index < self.num_frames]
        self.step_times = [round(self.times[index] * 1e9) / 1e9 for index in self.steps]
        """When they began, rounded as the times of rows are."""
        self._cursor = self._checkpoints[0].load()

    @property
    def rows(self) -> dict[int, Row]:
        """All sequences, by id."""
        return self._rows.rows

    @property
    def receipts(self) -> dict[int, Receipt]:
        """By request id."""
        return self._rows.receipts

    @property
    def begin(self) -> float:
        return self.times[0]

    @property
    def end(self) -> float:
        """When the last step ended."""
        ends = (row.end for row in self.rows.values() if row.end is not None)
        return max(self.times[self.num_frames - 1], max(ends, default=0.0))

    def index_at(self, time: float) -> int:
        """Return the index of the first frame that was recorded later."""
        return min(bisect_right(self.times, time), self.num_frames)

    def step_at(self, time: float) -> int:
        """Return the index of the first frame that begins a step at that time, or later."""
        number = bisect_left(self.step_times, time)
        return self.steps[number] if number < len(self.steps) else self.num_frames

    def to(self, index: int) -> Replay:
        """Return a replay of the frames before `index`, which the caller may go on with."""
        return self._seek(index).save().load()

    def snapshot(self, time: float) -> Snapshot:
        """Return the state after all steps that began up to then."""
        strategy = self._seek(self.index_at(time)).engine.strategy

        def first_token(request_id: int) -> float | None:
            row = self.rows.get(request_id)
            return None if row is None or row.first is None or row.first > time else row.first

        return take_snapshot(strategy, (), first_token, time)

    def _seek(self, index: int) -> Replay:
        """Bring the cursor to a frame, from a checkpoint if that is nearer."""
        nearest = max(
            (one for one in self._checkpoints if one.index <= index), key=lambda one: one.index
        )
        if not nearest.index <= self._cursor.index <= index:
            self._cursor = nearest.load()
        self._cursor.run_to(index)
        return self._cursor

    def _watch(self, replay: Replay) -> tuple[Observer, ...]:
        strategy = replay.engine.strategy
        ledger = Ledger(strategy, replay.now_ns)
        self._rows = Rows(strategy, replay.now_ns, ledger)
        return ledger, self._rows

    def _run(self, replay: Replay) -> Difference | None:
        self._checkpoints.append(replay.save())
        distance = max(LEAST_STEPS, len(self.steps) // NUM_CHECKPOINTS)
        for index in self.steps[distance::distance]:
            difference = replay.run_to(index)
            if difference is not None:
                return difference
            self._checkpoints.append(replay.save())
        return replay.run()


def _time_of(frame: AnyFrame) -> float:
    match frame:
        case Arrived() | Scheduled() | Waited():
            return frame.at
        case Aborted():
            return frame.at_ns / 1e9
        case _:
            return 0.0
