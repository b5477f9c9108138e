"""Two futures of a moment: what differs is what was changed."""

from __future__ import annotations

import pytest

from benchmarks.replay.forecast import forecast
from benchmarks.replay.page.causes import causes_of
from benchmarks.replay.page.forks import Forks, script_from
from benchmarks.replay.page.tape import Tape
from benchmarks.replay.script import script_of
from core.errors import ConfigurationError
from tests.benchmarks.replay.recordings import random_asks, record


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


def test_unfinished_requests_go_on_and_ended_ones_do_not(tape: Tape) -> None:
    at = (tape.begin + tape.end) / 2
    before, _ = Forks(tape).fork(at, {})
    ids = {row.id for row in before.rows}
    assert ids == {row.id for row in tape.rows.values() if row.end is None or row.end > at}
    assert any(row.arrived == at for row in before.rows)
    script = script_from(tape, at)
    for row in before.rows:
        recorded, arrived = tape.rows[row.id], next(a for a in script.arrivals if a.id == row.id)
        assert arrived.num_prompt_tokens - recorded.num_prompt_tokens + row.generated == (
            recorded.generated
        )


def test_without_the_causes_a_request_starts_earlier(tape: Tape) -> None:
    waits = {id: causes_of(tape, id) for id in tape.rows}
    cause, id = max(
        ((c, id) for id, causes in waits.items() for c in causes if c.reason == "blocks"),
        key=lambda pair: pair[0].until - pair[0].since,
    )
    before, after = Forks(tape).fork(cause.since, {}, cause.ids)
    [then] = [row for row in before.rows if row.id == id]
    [now] = [row for row in after.rows if row.id == id]
    assert then.admitted is not None
    assert now.admitted is not None
    assert now.admitted < then.admitted
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
