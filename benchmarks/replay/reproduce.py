"""Runs a recording under its own options, and compares the schedule step for step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from benchmarks.replay.executor import RecordedDrafts, ReplayExecutor
from benchmarks.replay.script import VOCABULARY, Script, params_of, script_of
from core.protocol.facts import Facts
from engine.engine import Engine
from engine.observers.frames import Aborted, AnyFrame, Arrived, Done, Header, Scheduled, Waited
from engine.observers.recorder import Recorder
from engine.observers.store import Recording
from engine.scores.part import PromptScores
from strategies.factory import StrategySettings, make_strategy


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


def make_engine(
    header: Header, settings: StrategySettings, script: Script, *, repeats: bool
) -> tuple[Engine, ReplayExecutor]:
    """Return an engine with the strategy that serves, and an executor that computes nothing.

    repeats: whether it will run the steps of the recording.
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
    strategy = make_strategy(settings)
    if header.drafts and repeats:
        strategy.extension = RecordedDrafts(strategy, script, executor)
    features = (PromptScores(),)
    return Engine(strategy, executor, facts, overlaps=header.overlaps, features=features), executor


def submit(engine: Engine, script: Script, arrived: Arrived, now: float) -> int:
    """Add a recorded request and return its id. Raises what `Engine.add` raises."""
    return engine.add(script.prompt(arrived), params_of(arrived), now, script.parts(arrived))


def reproduce(recording: Recording) -> Reproduction:
    """Replay every call of the engine in order, until the first difference."""
    script = script_of(recording.frames, recording.header.link_tokens)
    return _Replay(recording, script).run()


class _Replay:
    def __init__(self, recording: Recording, script: Script) -> None:
        header = recording.header
        self._script = script
        self._engine, _ = make_engine(header, header.settings, script, repeats=True)
        self._frames = recording.frames
        self._index = 0
        self._num_steps = 0
        self._num_requests = 0
        self._seen: list[AnyFrame] = []
        self._engine.observer = Recorder(self._engine.strategy, self._seen.extend)
        self._engine.next_id = next((f.id for f in self._frames if isinstance(f, Arrived)), 0)

    def run(self) -> Reproduction:
        disabled = logging.root.manager.disable
        logging.disable()  # the engine logs each failure of the recording again
        try:
            difference = None
            while self._index < len(self._frames) and difference is None:
                difference = self._next()
            return Reproduction(self._num_steps, self._num_requests, difference)
        finally:
            logging.disable(disabled)

    def _next(self) -> Difference | None:
        frame = self._take()
        if not isinstance(frame, Scheduled | Waited):
            return self._apply(frame)
        differences = []
        events = list(takewhile(lambda frame: isinstance(frame, Arrived | Aborted), self._rest()))
        self._index += len(events)
        results = list(takewhile(lambda frame: isinstance(frame, Done), self._rest()))
        self._index += len(results)

        def between() -> None:
            differences.extend(filter(None, map(self._apply, events)))
            events.clear()

        self._seen.clear()
        self._engine.step(frame.at, between)
        between()
        expected = list(map(_essence, (frame, *results)))
        seen = [_essence(f) for f in self._seen if not isinstance(f, Arrived | Aborted)]
        for recorded, replayed in zip(expected, seen, strict=False):
            if recorded != replayed:
                return self._difference(recorded, replayed)
        if len(expected) != len(seen):
            return self._difference(expected[len(seen) :], seen[len(expected) :])
        self._num_steps += isinstance(frame, Scheduled)
        return next(iter(differences), None)

    def _apply(self, frame: AnyFrame) -> Difference | None:
        """Let a request arrive or end."""
        match frame:
            case Arrived():
                self._num_requests += 1
                id = submit(self._engine, self._script, frame, frame.at)
                return None if id == frame.id else self._difference(f"request {frame.id}", str(id))
            case Aborted():
                self._engine.abort(frame.id, frame.index)
            case _:
                pass
        return None

    def _take(self) -> AnyFrame:
        self._index += 1
        return self._frames[self._index - 1]

    def _rest(self) -> Iterable[AnyFrame]:
        return (self._frames[i] for i in range(self._index, len(self._frames)))

    def _difference(self, recorded: object, replayed: object) -> Difference:
        return Difference(self._num_steps, str(recorded), str(replayed))


def _essence(frame: AnyFrame) -> AnyFrame:
    """Return a frame without what is measured, or secret."""
    if not isinstance(frame, Done):
        return frame
    searched = [msgspec.structs.replace(step, links=b"") for step in frame.searched]
    return msgspec.structs.replace(frame, wall_ns=0, model_ns=0, links=b"", searched=searched)
