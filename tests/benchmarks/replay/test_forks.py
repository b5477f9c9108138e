"""Two futures of a moment: what differs is what was changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from benchmarks.replay.cost import LinearCost
from benchmarks.replay.forecast import forecast, serve
from benchmarks.replay.page.causes import causes_of
from benchmarks.replay.page.forks import Forks
from benchmarks.replay.page.tape import Tape
from benchmarks.replay.script import Row, rows_of, script_of
from core.configuration.record import Value
from core.configuration.strategy_table import BATCHING_NAMES, Batching
from core.errors import ConfigurationError
from core.plan import StepPlan
from engine.executor import Observer
from engine.observers.frames import AnyFrame, Scheduled
from strategies.base import Strategy
from tests.benchmarks.replay.recordings import mixed_asks, random_asks, record
from tests.benchmarks.replay.timed import OVERHEAD_S, TOKEN_S

COST = LinearCost((OVERHEAD_S, TOKEN_S, 0.0, 0.0, 0.0))
"""What the steps of these recordings take."""
Changes = Mapping[str, Value]


@pytest.fixture(scope="module")
def tape() -> Tape:
    return Tape(record("paged", random_asks(seed=3, count=40, seconds=4), num_blocks=12))


def test_from_the_beginning_it_is_a_replay_with_other_options(tape: Tape) -> None:
    header, forks = tape.recording.header, Forks(tape)
    same, _ = forks.fork(tape.begin - 1, {})
    script = script_of(tape.recording.frames, header.link_tokens)
    figures, _ = forecast(header, header.settings, script, forks.cost)
    assert figures is not None
    assert same.figures["requests_per_s"] == figures.requests_per_s
    assert (same.figures["first_token_p50"], same.figures["first_token_p99"]) == figures.first_token


Step = tuple[list[Row], object, tuple[int, int, int]]
"""What a step computes and moves, and how many run, wait and are free then."""


def steps(frames: list[AnyFrame]) -> list[Step]:
    found, rows = list[Step](), list[Row]()
    for frame in frames:
        if isinstance(frame, Scheduled):
            rows = rows_of(frame, rows)
            counts = frame.num_running, frame.num_waiting, frame.num_free_blocks
            found.append((rows, frame.copies, counts))
    return found


class Steps(Observer):
    """Collects the steps of an engine that may have one in flight."""

    def __init__(self, strategy: Strategy) -> None:
        self.found: list[Step] = []
        self._strategy = strategy

    def scheduled(self, plan: StepPlan | None) -> None:
        if plan is not None:
            strategy = self._strategy
            rows = [(chunk.sequence.id, chunk.start, chunk.length) for chunk in plan.chunks]
            counts = (
                strategy.num_running, len(strategy.waiting), strategy.memory.num_free_blocks
            )  # fmt: skip
            self.found.append((rows, plan.moves.copies, counts))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_with_the_recorded_options_the_rest_is_as_recorded(
    batching: Batching, overlaps: bool
) -> None:
    """From any step, with all that is held, cached and queued then."""
    asks = mixed_asks(seed=5, count=30, seconds=1.5)
    tape = Tape(record(batching, asks, num_blocks=18, max_delay_s=0.1, overlaps=overlaps))
    assert tape.difference is None
    header, frames, forks = tape.recording.header, tape.recording.frames, Forks(tape)
    recorded = steps(frames)
    for index in random.Random(0).sample(tape.steps, 8):
        beginning, script = forks.beginning(index, 0.0)
        seen: list[Steps] = []

        def watch(strategy: Strategy, clock_ns: Callable[[], int]) -> list[Steps]:
            seen.append(Steps(strategy))  # noqa: B023
            return seen  # noqa: B023

        serve(header, header.settings, script, COST, watch=watch, beginning=beginning)
        number = sum(isinstance(frame, Scheduled) for frame in frames[:index])
        assert seen[0].found == recorded[number:]


def test_the_rows_of_the_recorded_options_are_as_recorded(tape: Tape) -> None:
    for share in (0.2, 0.5, 0.8):
        at = tape.begin + share * (tape.end - tape.begin)
        same, _ = Forks(tape).fork(at, {})
        assert same.keeps_memory
        ids = {row.id for row in same.rows}
        assert ids == {id for id, row in tape.rows.items() if row.end and row.end > same.at}
        for row in same.rows:
            recorded = tape.rows[row.id]
            assert (row.generated, row.ended_by) == (recorded.generated, recorded.ended_by)
            assert [b.phase for b in row.breaks] == [b.phase for b in recorded.breaks]
            for name in ("arrived", "admitted", "first", "end"):
                assert getattr(row, name) == pytest.approx(getattr(recorded, name), abs=1e-6)


def test_what_runs_goes_on_with_another_strategy_that_has_the_same_memory() -> None:
    tape = Tape(record("continuous", random_asks(seed=3, count=40, seconds=4), num_blocks=24))
    at = tape.begin + 1
    before, after = Forks(tape).fork(at, {"batching": "none"})
    running = [row for row in after.rows if row.admitted is not None and row.admitted < after.at]
    assert len(running) == tape.snapshot(at).num_running > 1
    assert after.keeps_memory
    assert not any(row.breaks for row in after.rows)
    ends = max(row.end or 0 for row in running)
    assert min(row.admitted or 0 for row in after.rows if row not in running) >= ends
    assert after.figures["requests_per_s"] < before.figures["requests_per_s"]


@pytest.mark.parametrize("changes", [{"batching": "continuous"}, {"num_kv_blocks": 20}], ids=str)
def test_with_another_memory_what_runs_is_computed_again(tape: Tape, changes: Changes) -> None:
    at = tape.begin + 2
    before, after = Forks(tape).fork(at, changes)
    assert (before.num_preempted, before.keeps_memory) == (0, True)
    assert (after.num_preempted, after.keeps_memory) == (tape.snapshot(at).num_running, False)
    again = [row for row in after.rows if any(each.since == after.at for each in row.breaks)]
    assert len(again) == after.num_preempted > 1
    for row in after.rows:
        assert row.generated == tape.rows[row.id].generated


def test_beams_and_samples_go_on_with_any_strategy() -> None:
    tape = Tape(record("paged", mixed_asks(seed=5, count=30, seconds=1.5), num_blocks=18))
    for batching in BATCHING_NAMES:
        for changes in ({"batching": batching}, {"batching": batching, "num_kv_blocks": 30}):
            _, after = Forks(tape).fork(tape.begin + 0.6, changes)
            assert after.num_refused == 0
            assert all(row.end is not None for row in after.rows)


def test_requests_that_are_too_long_for_the_options_are_refused(tape: Tape) -> None:
    at = tape.begin + 2
    before, after = Forks(tape).fork(at, {"max_model_len": 20})
    assert after.num_refused > 0
    dropped = {row.id for row in before.rows} - {row.id for row in after.rows}
    assert len(dropped) == after.num_refused


def test_without_the_causes_a_request_starts_at_once(tape: Tape) -> None:
    waits = [
        (cause, id)
        for id, row in tape.rows.items()
        for cause in causes_of(tape, id)
        if cause.reason == "blocks" and row.admitted and cause.until <= row.admitted
    ]
    for cause, id in sorted(waits, key=lambda wait: wait[0].since - wait[0].until)[:4]:
        before, after = Forks(tape).fork(cause.since, {}, cause.ids)
        [then] = [row for row in before.rows if row.id == id]
        [now] = [row for row in after.rows if row.id == id]
        assert then.admitted == pytest.approx(tape.rows[id].admitted)
        assert now.admitted == cause.since
        assert not {row.id for row in after.rows} & set(cause.ids)


def test_another_strategy_waits_longer(tape: Tape) -> None:
    before, after = Forks(tape).fork(tape.begin + 1, {"batching": "none"})
    assert (before.settings.batching, after.settings.batching) == ("paged", "none")
    assert after.figures["wait_p50"] > 2 * before.figures["wait_p50"]
    assert after.figures["requests_per_s"] < before.figures["requests_per_s"]


def test_options_that_do_not_fit_are_errors(tape: Tape) -> None:
    with pytest.raises(ValueError, match="lower option"):
        Forks(tape).fork(tape.begin, {"num_kv_blocks": 2})
    with pytest.raises(ConfigurationError):
        Forks(tape).fork(tape.begin, {"num_kv_blocks": -1})
