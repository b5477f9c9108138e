"""The client of the engine against a scripted one: health, answers, aborts, death and return."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from container.wire.engine_client import MAX_SILENCE_S, EngineClient
from container.wire.token_stream import TokenStream
from core.errors import (
    EngineUnavailableError,
    GenerationError,
    OverloadedError,
    RequestError,
)
from core.messages import Abort, Hello, Submit
from core.sampling import Finish, SamplingParams
from tests.container.conftest import eventually
from tests.container.fake_engine import FakeEngine, fails, says, stalls

PARAMS = SamplingParams(max_tokens=5)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def failure_of(stream: TokenStream) -> str:
    """What the stream ends with, which must come soon."""
    with pytest.raises(GenerationError) as caught:
        stream.get(5)
    return str(caught.value)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed_client(endpoint: str, engine: FakeEngine, clock: Clock) -> Iterator[EngineClient]:
    client = EngineClient(endpoint, heartbeat_timeout_s=60, clock=clock)

    def is_up() -> bool:
        clock.now += 0.01
        return client.health().healthy

    eventually(is_up)
    yield client
    client.close()


def test_tokens_arrive_in_order_and_end_once(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = says([1, 2, 3, 4, 5, 6])
    stream = client.submit([9, 9], PARAMS)
    token_ids: list[int] = []
    finish = None
    while finish is None:
        for generated in stream.get(5):
            token_ids += generated.token_ids
            finish = generated.finish
    assert (token_ids, finish) == ([1, 2, 3, 4, 5], Finish.LENGTH)
    stream.abort()
    assert engine.of_type(Abort) == []


def test_waiting_tokens_come_as_one(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = says([1, 2, 3, 4, 5])
    first, second = client.submit([9], PARAMS), client.submit([9], PARAMS)
    while not any(each.finish for each in second.get(5)):
        pass
    (merged,) = first.get(5)
    assert merged.token_ids == (1, 2, 3, 4, 5)
    assert merged.finish is Finish.LENGTH


def test_ids_are_unique_among_clients(client: EngineClient, engine: FakeEngine) -> None:
    other = EngineClient(engine._endpoint, heartbeat_timeout_s=60)
    eventually(lambda: other.health().healthy)
    ids = {each.submit([1], PARAMS).id for each in (client, other) for _ in range(3)}
    other.close()
    assert len(ids) == 6


@pytest.mark.parametrize(
    ("kind", "error"),
    [("rejected", RequestError), ("overloaded", OverloadedError), ("failed", GenerationError)],
)
def test_failures_are_errors(
    client: EngineClient, engine: FakeEngine, kind: str, error: type[Exception]
) -> None:
    engine.script = fails(kind, "no luck", "top_p")
    with pytest.raises(error, match="no luck"):
        client.submit([1], PARAMS).get(5)


def test_tokens_before_a_failure_are_kept(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = fails("failed", "no luck", after=[7])
    stream = client.submit([1], PARAMS)
    (generated,) = stream.get(5)
    assert generated.token_ids == (7,)
    with pytest.raises(GenerationError, match="no luck"):
        stream.get(5)
    with pytest.raises(GenerationError, match="no luck"):
        stream.get(5)


def test_abort_is_sent_once(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = stalls()
    stream = client.submit([1], PARAMS)
    stream.abort()
    stream.abort()
    eventually(lambda: engine.of_type(Abort))
    assert engine.of_type(Abort) == [Abort(stream.id)]
    assert stream.get(0.01) == []


def test_a_request_is_over_with_its_last_answer(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = says([1, 2, 3], [4], [5, 6])
    params = SamplingParams(n=3, max_tokens=5, logprobs=1, prompt_logprobs=0)
    stream, other = client.submit([9, 8], params), client.submit([9], params)
    while not other.has_ended:
        other.get(5)
    merged = {each.index: each for each in stream.get(5)}
    assert {index: each.token_ids for index, each in merged.items()} == {
        0: (1, 2, 3),
        1: (4,),
        2: (5, 6),
    }
    assert [len(each.top) for each in merged.values()] == [3, 1, 2]
    assert [len(each.prompt) for each in merged.values()] == [1, 0, 0]
    assert {each.finish for each in merged.values()} == {Finish.LENGTH}
    assert stream.has_ended
    stream.abort()
    assert engine.of_type(Abort) == []


def test_answers_are_aborted_one_by_one(client: EngineClient, engine: FakeEngine) -> None:
    """With the last open one the request."""
    engine.script = stalls(after=[1])
    stream = client.submit([9], SamplingParams(n=2))
    for index in (1, 1, 0, 0):
        stream.abort(index)
    eventually(lambda: len(engine.of_type(Abort)) == 2)
    assert engine.of_type(Abort) == [Abort(stream.id, 1), Abort(stream.id)]


def test_not_ready_until_the_engine_is(endpoint: str) -> None:
    client = EngineClient(endpoint, heartbeat_timeout_s=60)
    assert client.health().reason == "the engine is starting"
    with pytest.raises(EngineUnavailableError, match="starting"):
        client.submit([1], PARAMS)
    engine = FakeEngine(endpoint, stalls(), ready=False)
    eventually(lambda: engine.of_type(Hello))
    assert not client.health().healthy
    engine.ready = True
    eventually(lambda: client.health().healthy)
    client.close()
    engine.close()


def test_silence_counts_as_death(
    timed_client: EngineClient, engine: FakeEngine, clock: Clock
) -> None:
    engine.heartbeats = False
    engine.script = stalls()
    stream = timed_client.submit([1], PARAMS)
    eventually(lambda: engine.of_type(Submit))
    engine.ready = False
    failures: list[str] = []

    def has_failed() -> bool:
        clock.now += MAX_SILENCE_S  # again where a last heartbeat was still on its way
        try:
            stream.get(0.02)
        except GenerationError as error:
            failures.append(str(error))
        return bool(failures)

    eventually(has_failed)
    assert failures == ["no heartbeat of the engine for 10 s"]
    assert not timed_client.health().healthy


def test_an_engine_without_steps_is_stuck(
    timed_client: EngineClient, engine: FakeEngine, clock: Clock
) -> None:
    engine.step_age_s = 60.0
    eventually(lambda: not timed_client.health().healthy)
    assert timed_client.health().reason == "the engine is stuck: no step ended for 60 s"
    engine.step_age_s = 1.0
    eventually(lambda: timed_client.health().healthy)


def test_death_fails_all_and_a_new_engine_is_found(
    client: EngineClient, engine: FakeEngine, endpoint: str
) -> None:
    engine.script = stalls()
    stream = client.submit([1], PARAMS)
    engine.die("out of memory")
    assert "out of memory" in failure_of(stream)
    assert "out of memory" in client.health().reason
    successor = FakeEngine(endpoint, says([1]))
    eventually(lambda: client.health().healthy)
    (generated,) = client.submit([1], PARAMS).get(5)
    assert generated.finish is Finish.LENGTH
    assert [each.id for each in successor.received if isinstance(each, Submit)] != [stream.id]
    successor.close()


def test_sudden_death_is_noticed_at_once(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = stalls()
    stream = client.submit([1], PARAMS)
    eventually(lambda: engine.of_type(Submit))
    engine.close()
    assert failure_of(stream) == "the engine has ended"
    assert not client.health().healthy
