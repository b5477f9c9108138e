"""What the engine server reports: heartbeats, statistics and snapshots."""

from __future__ import annotations

import time

import pytest

from core.protocol.messages import (
    Abort,
    FromEngine,
    Heartbeat,
    Hello,
    Ready,
    Refused,
    Step,
    Submit,
    Watch,
    Watched,
)
from core.sampling import Finish, SamplingParams
from engine.serve.stall_timer import StallTimer
from tests.engine.serve.serving import (
    greedy,
    until,
)


def test_heartbeats_show_a_stuck_step_loop(client, gate):
    client.send(Hello())
    until(lambda: client.receive(Heartbeat).step_age_s < 1)
    gate.open.clear()
    client.send(Submit("a", [1], greedy()))
    until(lambda: client.receive(Heartbeat).step_age_s > 1)
    gate.open.set()


@pytest.fixture
def sleeping(monkeypatch):
    """Make the server believe that no thread of the process ever runs."""
    monkeypatch.setattr("engine.serve.connection.StallTimer", lambda: StallTimer(lambda: False))


def test_heartbeats_show_a_step_that_stands_still(sleeping, client, gate):
    gate.open.clear()
    client.send(Submit("a", [1], greedy()))
    until(lambda: client.receive(Heartbeat).stalled_s > 0)
    gate.open.set()


def test_answers_have_timings_and_heartbeats_count_them(client):
    client.send(Submit("a", [1, 2, 3], greedy(2)))
    first = client.receive(Step).outputs[0][1]
    last = client.receive(Step).outputs[0][1]
    assert (first.timing, last.finish) == (None, Finish.LENGTH)
    timing = last.timing
    assert timing.arrived <= timing.admitted <= timing.first_token <= timing.finished
    stats = stats_when(client, lambda stats: stats.finished and not stats.num_running)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (3, 2)
    assert (stats.num_steps, stats.finished) == (2, {"length": 1})


def stats_when(client, condition):
    """Return the statistics of the first heartbeat for which the condition is true."""
    seen = []
    until(lambda: seen.append(client.receive(Heartbeat).stats) or condition(seen[-1]))
    return seen[-1]


@pytest.fixture
def rare_heartbeats(monkeypatch):
    monkeypatch.setattr("engine.serve.connection.HEARTBEAT_INTERVAL_S", 60.0)


def test_an_engine_that_becomes_idle_says_so_at_once(rare_heartbeats, client):
    """The engine does not wait until a message wakes the loop.

    It sends the statistics even before the last token, so a client that has this token finds it
    counted.
    """
    client.send(Submit("a", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)))
    stats = stats_when(client, lambda stats: stats.finished)
    assert (stats.num_running, stats.num_held_blocks) == (0, 0)
    assert stats.finished == {"length": 1}
    assert client.answer("a")[1] == Finish.LENGTH


def test_aborts_are_counted_by_their_reason(client, engine, gate, connection):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    gate.open.clear()
    for id in ("a", "b", "c"):
        client.send(Submit(id, [1, 2, 3], params))
    until(lambda: engine.strategy.running)
    for id, reason in (("a", "disconnect"), ("b", "timeout"), ("c", "stop_string")):
        client.send(Abort(id, None, reason))
        client.send(Abort(id, None, reason))
    client.send(Refused({"invalid": 2}))
    strategy = engine.strategy
    until(lambda: connection.inbox.qsize() + len(strategy.running) + len(strategy.waiting) == 3 + 7)
    gate.open.set()
    stats = stats_when(client, lambda stats: stats.refused)
    assert stats.aborted == {"disconnect": 1, "timeout": 1}
    assert stats.finished == {"abort": 2, "stop": 1}
    assert stats.refused == {"invalid": 2}


def test_a_client_that_watches_gets_snapshots_until_it_wants_no_more(client, engine, gate):
    gate.open.clear()
    client.send(Watch(60.0))
    client.send(Submit("a", [1, 2, 3], greedy(9)))
    until(lambda: engine.strategy.running)
    gate.open.set()
    while not (snapshot := client.receive(Watched).snapshot).ended:
        pass
    (answer,) = snapshot.ended
    assert answer.timing.arrived <= answer.timing.first_token <= answer.timing.finished
    client.send(Watch(0.0))
    client.send(Hello())
    client.receive(Ready)
    client.send(Submit("b", [1], greedy(9)))
    kinds = {type(client.receive(FromEngine)) for _ in range(12)}
    assert kinds == {Step, Heartbeat}


def test_heartbeats_have_the_time_outside_the_model(engine, gate, client):
    """The time does not include the executor's own, which is most of a step."""
    submit, held = gate.submit, []

    def timed(plan, between_tokens):
        with engine.model_time:
            begin = time.monotonic()
            until(lambda: time.monotonic() > begin + 0.1)
            held.append(time.monotonic() - begin)
            return submit(plan, between_tokens)

    gate.submit = timed
    begin = time.monotonic()
    client.send(Submit("a", [1, 2, 3], greedy(1)))
    stats = stats_when(client, lambda stats: stats.finished and not stats.num_running)
    assert 0 < stats.host_s < time.monotonic() - begin - sum(held)
