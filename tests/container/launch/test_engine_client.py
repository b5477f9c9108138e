"""The engine client with a fake engine: health, answers, aborts, engine death and restart."""

from __future__ import annotations

from collections.abc import Iterator

import gevent
import pytest

from container.wire.channel import HELLO_INTERVAL_S, MAX_UNANSWERED_HELLOS
from container.wire.engine_client import EngineClient
from container.wire.engine_connection import MAX_SILENCE_S
from container.wire.token_stream import TokenStream
from core.errors import (
    EngineUnavailableError,
    GenerationError,
    OverloadedError,
    RequestError,
)
from core.output import Output
from core.protocol.messages import Abort, Failed, Hello, Step, Submit
from core.sampling import Finish, SamplingParams
from tests.clock import Clock
from tests.container.conftest import eventually
from tests.container.fake_engine import FakeEngine, fails, says, stalls

PARAMS = SamplingParams(max_tokens=5)


def failure_of(stream: TokenStream) -> str:
    """Return the message of the error that the stream must raise within 60 s."""
    with pytest.raises(GenerationError) as caught:
        stream.get(60)
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


def test_tokens_arrive_in_order_with_one_end(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = says([1, 2, 3, 4, 5, 6])
    stream = client.choose().submit(Submit("", [9, 9], PARAMS))
    token_ids: list[int] = []
    finish = None
    while finish is None:
        for generated in stream.get(60):
            token_ids += generated.token_ids
            finish = generated.finish
    assert (token_ids, finish) == ([1, 2, 3, 4, 5], Finish.LENGTH)
    stream.abort()
    assert engine.of_type(Abort) == []


def test_waiting_tokens_are_merged(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = says([1, 2, 3, 4, 5])
    first, second = (
        client.choose().submit(Submit("", [9], PARAMS)),
        client.choose().submit(Submit("", [9], PARAMS)),
    )
    while not any(generated.finish for generated in second.get(60)):
        pass
    (merged,) = first.get(60)
    assert merged.token_ids == (1, 2, 3, 4, 5)
    assert merged.finish is Finish.LENGTH


def test_a_patient_reader_gets_whole_answers(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = stalls(after=[1, 2])
    stream = client.choose().submit(Submit("", [9], SamplingParams(n=2)))
    assert [output.token_ids for output in stream.get(0.2, is_patient=True)] == [(1, 2)]
    for finish, patience_s in ((None, 0.2), (Finish.LENGTH, 60)):
        engine.send(Step([(stream.id, Output(0, (3,), (-0.5,), finish, index=1))]))
        (output,) = stream.get(patience_s, is_patient=True)
        assert (output.token_ids, output.finish) == ((3,), finish)
    engine.send(Failed(stream.id, "failed", "no luck"))
    with pytest.raises(GenerationError, match="no luck"):
        stream.get(60, is_patient=True)


def test_tokens_wait_for_others_with_a_delay(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = says([1, 2, 3, 4, 5])
    num_outputs: list[int] = []
    for delay_s in (0.0, 0.3):
        client.delay_streams(delay_s)
        gevent.sleep(0.3)  # until a heartbeat has been read
        stream = client.choose().submit(Submit("", [9], PARAMS))
        outputs: list[Output] = []
        while not outputs or outputs[-1].finish is None:
            outputs += stream.get(60)
        num_outputs.append(len(outputs))
    assert num_outputs[0] == 5
    assert num_outputs[1] <= 2


def test_ids_are_unique_among_clients(client: EngineClient, engine: FakeEngine) -> None:
    other = EngineClient(engine.endpoint, heartbeat_timeout_s=60)
    eventually(lambda: other.health().healthy)
    ids = {
        sender.choose().submit(Submit("", [1], PARAMS)).id
        for sender in (client, other)
        for _ in range(3)
    }
    other.close()
    assert len(ids) == 6


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("rejected", RequestError),
        ("overloaded", OverloadedError),
        ("failed", GenerationError),
    ],
)
def test_failures_raise_errors(
    client: EngineClient, engine: FakeEngine, kind: str, error: type[Exception]
) -> None:
    engine.script = fails(kind, "no luck", "top_p")
    with pytest.raises(error, match="no luck"):
        client.choose().submit(Submit("", [1], PARAMS)).get(60)


def test_tokens_before_a_failure_are_kept(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = fails("failed", "no luck", after=[7])
    stream = client.choose().submit(Submit("", [1], PARAMS))
    (generated,) = stream.get(60)
    assert generated.token_ids == (7,)
    with pytest.raises(GenerationError, match="no luck"):
        stream.get(60)
    with pytest.raises(GenerationError, match="no luck"):
        stream.get(60)


def test_abort_is_sent_once(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = stalls()
    stream = client.choose().submit(Submit("", [1], PARAMS))
    stream.abort()
    stream.abort()
    eventually(lambda: engine.of_type(Abort))
    assert engine.of_type(Abort) == [Abort(stream.id)]
    assert stream.get(0.01) == []


def test_a_request_ends_with_its_last_answer(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = says([1, 2, 3], [4], [5, 6])
    params = SamplingParams(n=3, max_tokens=5, logprobs=1, prompt_logprobs=0)
    stream, other = (
        client.choose().submit(Submit("", [9, 8], params)),
        client.choose().submit(Submit("", [9], params)),
    )
    while not other.has_ended:
        other.get(60)
    merged = {generated.index: generated for generated in stream.get(60)}
    assert {index: generated.token_ids for index, generated in merged.items()} == {
        0: (1, 2, 3),
        1: (4,),
        2: (5, 6),
    }
    assert [len(generated.top_logprobs) for generated in merged.values()] == [3, 1, 2]
    assert [len(generated.prompt_logprobs) for generated in merged.values()] == [1, 0, 0]
    assert {generated.finish for generated in merged.values()} == {Finish.LENGTH}
    assert stream.has_ended
    stream.abort()
    assert engine.of_type(Abort) == []


def test_answers_are_aborted_one_by_one(client: EngineClient, engine: FakeEngine) -> None:
    """Aborting the last open answer aborts the request."""
    engine.script = stalls(after=[1])
    stream = client.choose().submit(Submit("", [9], SamplingParams(n=2)))
    for index in (1, 1, 0, 0):
        stream.abort(index)
    eventually(lambda: len(engine.of_type(Abort)) == 2)
    assert engine.of_type(Abort) == [Abort(stream.id, 1), Abort(stream.id)]


def test_the_client_is_not_ready_before_the_engine(endpoint: str) -> None:
    client = EngineClient(endpoint, heartbeat_timeout_s=60)
    assert client.health().reason == "the engine is starting"
    with pytest.raises(EngineUnavailableError, match="starting"):
        client.choose().submit(Submit("", [1], PARAMS))
    engine = FakeEngine(endpoint, stalls(), ready=False)
    eventually(lambda: engine.of_type(Hello))
    assert not client.health().healthy
    engine.ready = True
    eventually(lambda: client.health().healthy)
    client.close()
    engine.close()


@pytest.fixture
def quick_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client look for messages every 10 ms.

    The tests advance the fake clock whenever they poll. A client that looked less often would take
    the engine for silent.
    """
    module = "container.wire.engine_connection"
    monkeypatch.setattr(f"{module}.LIVENESS_CHECK_INTERVAL_S", 0.01)


def test_a_silent_engine_is_unhealthy_before_it_counts_as_dead(
    timed_client: EngineClient, engine: FakeEngine, clock: Clock, quick_reading: None
) -> None:
    engine.script = stalls()
    stream = timed_client.choose().submit(Submit("", [1], PARAMS))
    engine.heartbeats = False

    def is_unhealthy() -> bool:
        clock.now += 0.05
        return not timed_client.health().healthy

    eventually(is_unhealthy)
    assert timed_client.health().reason == "no heartbeat from the engine for 4 s"
    assert stream.get(0.01) == []
    engine.heartbeats = True
    eventually(lambda: timed_client.health().healthy)


def test_a_worker_that_was_held_up_does_not_call_the_engine_dead(
    timed_client: EngineClient, engine: FakeEngine, clock: Clock
) -> None:
    engine.script = stalls()
    stream = timed_client.choose().submit(Submit("", [1], PARAMS))
    eventually(lambda: engine.of_type(Submit))
    for _ in range(3):
        clock.now += 10 * MAX_SILENCE_S
        assert timed_client.health().healthy
        assert stream.get(0.3) == []
    assert timed_client.health().healthy


def test_an_engine_that_hangs_in_a_step_is_unhealthy(
    timed_client: EngineClient, engine: FakeEngine
) -> None:
    engine.stalled_s = 3.0
    eventually(lambda: not timed_client.health().healthy)
    assert timed_client.health().reason == "the engine hangs in a step: no thread has run for 3 s"
    engine.stalled_s = 0.0
    eventually(lambda: timed_client.health().healthy)


def test_missing_heartbeats_count_as_death(
    timed_client: EngineClient, engine: FakeEngine, clock: Clock, quick_reading: None
) -> None:
    engine.heartbeats = False
    engine.script = stalls()
    stream = timed_client.choose().submit(Submit("", [1], PARAMS))
    eventually(lambda: engine.of_type(Submit))
    engine.ready = False
    failures: list[str] = []

    def has_failed() -> bool:
        clock.now += MAX_SILENCE_S  # repeatedly, as a last heartbeat may still arrive
        try:
            stream.get(0.02)
        except GenerationError as error:
            failures.append(str(error))
        return bool(failures)

    eventually(has_failed)
    assert failures == ["no heartbeat from the engine for 10 s"]
    assert not timed_client.health().healthy


def test_an_engine_that_completes_no_steps_is_stuck(
    timed_client: EngineClient, engine: FakeEngine, clock: Clock
) -> None:
    engine.step_age_s = 60.0
    eventually(lambda: not timed_client.health().healthy)
    assert timed_client.health().reason == "the engine is stuck: no step completed for 60 s"
    engine.step_age_s = 1.0
    eventually(lambda: timed_client.health().healthy)


def test_engine_death_fails_all_requests_and_a_new_engine_is_used(
    client: EngineClient, engine: FakeEngine, endpoint: str
) -> None:
    engine.script = stalls()
    stream = client.choose().submit(Submit("", [1], PARAMS))
    engine.die("out of memory")
    assert "out of memory" in failure_of(stream)
    assert "out of memory" in client.health().reason
    successor = FakeEngine(endpoint, says([1]))
    eventually(lambda: client.health().healthy)
    (generated,) = client.choose().submit(Submit("", [1], PARAMS)).get(60)
    assert generated.finish is Finish.LENGTH
    assert [message.id for message in successor.received if isinstance(message, Submit)] != [
        stream.id
    ]
    successor.close()


def test_an_engine_that_comes_late_is_not_flooded_with_hellos(endpoint: str, clock: Clock) -> None:
    client = EngineClient(endpoint, heartbeat_timeout_s=60, clock=clock)
    clock.step = HELLO_INTERVAL_S  # so that the client says hello whenever it looks at the clock
    eventually(lambda: clock.now > 100 + 20 * MAX_UNANSWERED_HELLOS * HELLO_INTERVAL_S)
    clock.step = 0.0
    engine = FakeEngine(endpoint, says([1]))
    try:
        eventually(lambda: client.health().healthy)
        assert 0 < len(engine.of_type(Hello)) <= MAX_UNANSWERED_HELLOS
    finally:
        client.close()
        engine.close()


def test_a_closed_connection_is_noticed_at_once(client: EngineClient, engine: FakeEngine) -> None:
    engine.script = stalls()
    stream = client.choose().submit(Submit("", [1], PARAMS))
    eventually(lambda: engine.of_type(Submit))
    engine.close()
    assert failure_of(stream) == "the engine has ended"
    assert not client.health().healthy
