"""Checks that hold for every recording, of tests and of real servers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.replay.page.causes import MOST_TRIED, Cause, causes_of
from benchmarks.replay.page.tape import Tape
from benchmarks.replay.reproduce import Difference, Replay
from benchmarks.replay.script import script_of
from engine.executor import Observer
from engine.observers.ledger import Ledger
from engine.observers.store import Recording


class Law(Observer):
    """At the end of each step, receipts and what has a name of its own are the engine's clock."""

    def __init__(self, replay: Replay) -> None:
        self.ledger = Ledger(replay.engine.strategy, replay.now_ns)
        self._clock_ns = replay.now_ns
        self.num_steps = 0

    def ends(self, outputs):
        total = self.ledger.num_charged_ns() + sum(self.ledger.others.values())
        assert total == self._clock_ns() - self.ledger.began_ns, self.num_steps
        self.num_steps += 1
        return outputs


def check_law(recording: Recording) -> tuple[Law, Difference | None]:
    """Replay a recording under the law. Return what was seen, and whether the replay differs."""
    laws: list[Law] = []

    def watch(replay: Replay) -> tuple[Observer, ...]:
        laws.append(Law(replay))
        return laws[0].ledger, laws[0]

    script = script_of(recording.frames, recording.header.link_tokens)
    difference = Replay(recording, script, watch).run()
    return laws[0], difference


def starts(tape: Tape, request_id: int, cause: Cause, without: Sequence[int]) -> bool:
    """Whether a request starts when a cause begins, if others have gone before."""
    replay = tape.to(tape.step_at(cause.since))
    for id in without:
        replay.engine.abort(id)
    replay.engine.step(cause.since)
    return all(group.request.id != request_id for group in replay.engine.strategy.waiting)


def check_causes(tape: Tape, request_id: int) -> list[Cause]:
    """Check the causes of a request, and return them.

    Without all that are named it starts, without fewer it does not; they cover all of its waits.
    """
    causes = causes_of(tape, request_id)
    for cause in causes:
        if cause.reason == "step" or not cause.blockers or cause.option:
            continue
        assert not starts(tape, request_id, cause, ()), cause
        assert starts(tape, request_id, cause, cause.ids), cause
        for id in cause.ids if len(cause.ids) <= MOST_TRIED else ():
            fewer = [other for other in cause.ids if other != id]
            assert not starts(tape, request_id, cause, fewer), cause
    row = tape.rows[request_id]
    waited = sum(cause.until - cause.since for cause in causes)
    breaks = sum((each.until or 0) - each.since for each in row.breaks if each.phase != "prefill")
    begins = row.end if row.admitted is None else row.admitted
    assert begins is not None
    assert waited == pytest.approx(begins - row.arrived + breaks, abs=1e-8)
    return causes
