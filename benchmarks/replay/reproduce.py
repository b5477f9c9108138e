"""Runs a recording under its own options, and compares the schedule step for step."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from benchmarks.replay.executor import RecordedDrafts, ReplayExecutor
from benchmarks.replay.script import VOCABULARY, Script, params_of, script_of
from core.protocol.facts import Facts
from engine.engine import Engine
from engine.executor import Observer
from engine.observers.frames import Aborted, AnyFrame, Arrived, Done, Header, Scheduled, Waited
from engine.observers.ledger import joined
from engine.observers.recorder import Recorder
from engine.observers.store import Recording
from engine.scores.part import PromptScores
from strategies.factory import StrategySettings, make_strategy
from strategies.memory.base import KVMemory


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay does something else than the recording."""

    step: int
    """The number of the step, from 0."""
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"step {self.step} differs\n  recorded: {self.recorded}\n  replayed: {self.replayed}"


@dataclass(frozen=True, slots=True)
class Reproduction:
    num_steps: int
    """Steps that were the same."""
    num_requests: int
    difference: Difference | None = None


Watch = Callable[["Replay"], Iterable[Observer]]


def make_engine(
    header: Header,
    settings: StrategySettings,
    script: Script,
    *,
    repeats: bool,
    memory: KVMemory | None = None,
) -> tuple[Engine, ReplayExecutor]:
    """Return an engine with the strategy that serves, and an executor that computes nothing.

    repeats: whether it will run the steps of the recording. memory: as in `make_strategy`.
    """
    whole_answers = header.executor == "library"
    executor = ReplayExecutor(script, whole_answers=whole_answers, repeats=repeats)
    facts = Facts(
        model="",
        architecture="",
        batching=settings.batching,
        batching_reason="",
        executor=header.executor,
        executor_reason="",
        device="",
        dtype="",
        max_model_len=settings.max_model_len,
        max_sequences=settings.limits.max_sequences,
        weights_bytes=header.weights_bytes,
        vocab_size=VOCABULARY,
        load_seconds=0.0,
    )
    strategy = make_strategy(settings, memory)
    if header.drafts and repeats:
        strategy.extension = RecordedDrafts(strategy, script, executor)
    features = (PromptScores(),)
    return Engine(strategy, executor, facts, overlaps=header.overlaps, features=features), executor


def submit(engine: Engine, script: Script, arrived: Arrived, now: float) -> int:
    """Add a recorded request and return its id. Raises what `Engine.add` raises."""
    return engine.add(script.prompt(arrived), params_of(arrived), now, script.parts(arrived))


def reproduce(recording: Recording) -> Reproduction:
    """Replay every call of the engine in order, until the first difference."""
    replay = Replay(recording, script_of(recording.frames, recording.header.link_tokens))
    difference = replay.run()
    return Reproduction(replay.num_steps, replay.num_requests, difference)


def _nobody(replay: Replay) -> Iterable[Observer]:
    return ()


class Replay:
    """Runs every call of a recorded engine again, in order, and compares what each step does."""

    def __init__(self, recording: Recording, script: Script, watch: Watch = _nobody) -> None:
        """watch: returns observers of the engine. Its clock is `now_ns`."""
        header = recording.header
        self._recording = recording
        self._script = script
        self.index = 0
        """Of the next frame."""
        self.num_steps = 0
        self.num_requests = 0
        self._now_ns = 0
        self._seen: list[AnyFrame] = []
        self.engine, _ = make_engine(header, header.settings, script, repeats=True)
        self._watchers = tuple(watch(self))
        self.engine.observer = joined((Recorder(self.engine.strategy, self._see), *self._watchers))
        self.engine.next_id = next((f.id for f in self.frames if isinstance(f, Arrived)), 0)

    @property
    def frames(self) -> list[AnyFrame]:
        return self._recording.frames

    def now_ns(self) -> int:
        """Return the time of the recording: of a request, or of the begin or the end of a step."""
        return self._now_ns

    def is_over(self) -> bool:
        return self.index >= len(self.frames)

    def save(self) -> SavedReplay:
        """Keep the state, so that replays can go on from here. Nothing watches those."""
        shared = (self._recording, self._script, self.engine.close)
        file = BytesIO()
        _Pickler(file, (*shared, *self._watchers)).dump(self)
        return SavedReplay(
            self.index, file.getvalue(), (*shared, *(Observer() for _ in self._watchers))
        )

    def run(self) -> Difference | None:
        """Run to the end, or to the first difference, and return it."""
        return self.run_to(len(self.frames))

    def run_to(self, index: int) -> Difference | None:
        """Run the frames before `index`, and those of a step that begins before it."""
        disabled = logging.root.manager.disable
        logging.disable()  # the engine logs each failure of the recording again
        try:
            difference = None
            while self.index < index and difference is None:
                difference = self._next()
            return difference
        finally:
            logging.disable(disabled)

    def _next(self) -> Difference | None:
        frame = self._take()
        if not isinstance(frame, Scheduled | Waited):
            return self._apply(frame)
        differences = []
        events = list(takewhile(lambda frame: isinstance(frame, Arrived | Aborted), self._rest()))
        self.index += len(events)
        results = list(takewhile(lambda frame: isinstance(frame, Done), self._rest()))
        self.index += len(results)
        begin_ns = round(frame.at * 1e9)
        end_ns = begin_ns + max(
            (done.wall_ns for done in results if isinstance(done, Done)), default=0
        )

        def between() -> None:
            differences.extend(filter(None, map(self._apply, events)))
            events.clear()
            self._now_ns = max(self._now_ns, end_ns)

        self._seen.clear()
        self._now_ns = max(self._now_ns, begin_ns)
        self.engine.step(frame.at, between)
        between()
        expected = list(map(_essence, (frame, *results)))
        seen = [_essence(f) for f in self._seen if not isinstance(f, Arrived | Aborted)]
        for recorded, replayed in zip(expected, seen, strict=False):
            if recorded != replayed:
                return self._difference(recorded, replayed)
        if len(expected) != len(seen):
            return self._difference(expected[len(seen) :], seen[len(expected) :])
        self.num_steps += isinstance(frame, Scheduled)
        return next(iter(differences), None)

    def _apply(self, frame: AnyFrame) -> Difference | None:
        """Let a request arrive or end."""
        match frame:
            case Arrived():
                self.num_requests += 1
                self._now_ns = max(self._now_ns, round(frame.at * 1e9))
                id = submit(self.engine, self._script, frame, frame.at)
                return None if id == frame.id else self._difference(f"request {frame.id}", str(id))
            case Aborted():
                self._now_ns = max(self._now_ns, frame.at_ns)
                self.engine.abort(frame.id, frame.index, frame.reason)
            case _:
                pass
        return None

    def _see(self, frames: list[AnyFrame]) -> None:
        self._seen += frames

    def _take(self) -> AnyFrame:
        self.index += 1
        return self.frames[self.index - 1]

    def _rest(self) -> Iterable[AnyFrame]:
        return (self.frames[i] for i in range(self.index, len(self.frames)))

    def _difference(self, recorded: object, replayed: object) -> Difference:
        return Difference(self.num_steps, str(recorded), str(replayed))


@dataclass(frozen=True, slots=True)
class SavedReplay:
    """The state of a replay. It is pickled, which is ten times as fast as `deepcopy`."""

    index: int
    """Of the next frame."""
    _data: bytes
    _shared: tuple[object, ...]

    def load(self) -> Replay:
        """Return a new replay with this state."""
        return _Unpickler(BytesIO(self._data), self._shared).load()


class _Pickler(pickle.Pickler):
    """Leaves out some objects."""

    def __init__(self, file: BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = {id(each): number for number, each in enumerate(shared)}

    def persistent_id(self, obj: object) -> int | None:
        return self._numbers.get(id(obj))

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, WeakKeyDictionary):
            return WeakKeyDictionary, (dict(obj),)
        if isinstance(obj, WeakSet):
            return WeakSet, (list(obj),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Puts others in their place."""

    def __init__(self, file: BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> object:
        return self._shared[pid]


def _essence(frame: AnyFrame) -> AnyFrame:
    """Return a frame without what is measured, or secret."""
    if not isinstance(frame, Done):
        return frame
    searched = [msgspec.structs.replace(step, links=b"") for step in frame.searched]
    return msgspec.structs.replace(frame, wall_ns=0, model_ns=0, links=b"", searched=searched)
