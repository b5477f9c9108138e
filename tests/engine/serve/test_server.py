"""The engine server: one final message per request, none after an abort, heartbeats."""

from __future__ import annotations

import time

import msgspec
import pytest

from core.beams import BeamSearch
from core.errors import EngineUnavailableError, InsufficientMemoryError
from core.protocol.messages import (
    Abort,
    Dead,
    Failed,
    Heartbeat,
    Hello,
    Ready,
    Step,
    Submit,
)
from core.sampling import Finish, SamplingParams, SequenceFailure
from engine.engine import MAX_FAILED_STEPS
from engine.serve.connection import EVERYONE, ConnectionBroken
from engine.serve.server import Server
from engine.serve.text_service import TextService
from tests.engine.serve.serving import (
    FACTS,
    Client,
    Gate,
    expected,
    greedy,
    until,
)


def test_hello_is_answered_with_facts(client):
    client.send(Hello())
    assert client.receive(Ready).facts == FACTS


def test_two_clients_get_their_own_answers(client, endpoint):
    other = Client(endpoint)
    client.send(Submit("a", [1, 2, 3], greedy()))
    assert client.answer("a") == (expected(0, [1, 2, 3], 5), Finish.LENGTH)
    other.send(Submit("a", [4, 5], greedy(3)))
    assert other.answer("a") == (expected(1, [4, 5], 3), Finish.LENGTH)
    other.close()


def test_an_invalid_request_is_rejected_with_its_field(client):
    client.send(Submit("good", [1, 2, 3], greedy()))
    for id, prompt, params in (
        ("long", [1] * 60, greedy()),
        ("empty", [], greedy()),
        ("foreign", [99], greedy()),
        ("negative", [-1], greedy()),
    ):
        client.send(Submit(id, prompt, params))
        failed = client.receive(Failed)
        assert (failed.id, failed.kind, failed.field) == (id, "rejected", "prompt")
    client.send(Submit("much", [1], greedy(100)))
    assert client.receive(Failed).field == "max_tokens"
    client.send(Submit("again", [1, 2], greedy()))
    assert client.answer("again") == (expected(1, [1, 2], 5), Finish.LENGTH)


def test_a_full_queue_rejects_requests(client, engine, gate, connection):
    """There are four slots and a queue of two, so the seventh request of a burst is rejected."""
    gate.open.clear()
    client.send(Submit("0", [1], greedy()))
    until(lambda: engine.strategy.running)
    for number in range(1, 8):
        client.send(Submit(f"{number}", [1], greedy()))
    until(lambda: connection.inbox.qsize() == 7)
    gate.open.set()
    refused = [client.receive(Failed) for _ in range(2)]
    assert [message.id for message in refused] == ["6", "7"]
    assert {message.kind for message in refused} == {"overloaded"}
    assert "2 requests are waiting" in refused[0].message


@pytest.mark.parametrize(
    "queue_limits",
    [{"max_waiting": 99, "max_waiting_tokens": 10}],
)
def test_waiting_tokens_are_limited(client, engine, gate, connection):
    """The prompts of all samples count, but a request that waits alone may have any size."""
    gate.open.clear()
    client.send(Submit("0", [1], greedy()))
    until(lambda: engine.strategy.running)
    two = msgspec.structs.replace(greedy(), n=2)
    prompts = {"alone": 8, "two samples": 2, "fits": 2, "one too many": 1}
    for id, length in prompts.items():
        params = two if id == "two samples" else greedy()
        client.send(Submit(id, [1] * length, params))
    until(lambda: connection.inbox.qsize() == len(prompts))
    gate.open.set()
    refused = [client.receive(Failed) for _ in range(2)]
    assert [message.id for message in refused] == ["two samples", "one too many"]
    assert {message.kind for message in refused} == {"overloaded"}
    assert "8 prompt tokens are waiting already, and 4 more would exceed 10" in refused[0].message
    until(lambda: not engine.strategy.waiting)
    client.send(Submit("large", [1] * 20, greedy()))
    assert client.answer("large")[1] == Finish.LENGTH


def test_abort_is_silent_frees_memory_and_is_idempotent(client, engine, gate, connection):
    gate.open.clear()
    client.send(Submit("a", [1, 2, 3], greedy(40)))
    until(lambda: engine.strategy.running)
    client.send(Abort("a"))
    client.send(Abort("a"))
    client.send(Abort("unknown"))
    client.send(Submit("b", [1], greedy(2)))
    until(lambda: connection.inbox.qsize() == 4)
    gate.open.set()
    assert client.answer("b")[1] == Finish.LENGTH
    assert engine.strategy.memory.num_held_blocks == 0
    assert gate.executor.num_steps < 10, "the aborted request runs no further steps"


def test_requests_of_a_lost_client_are_aborted(endpoint, engine, gate, connection, client):
    client.send(Hello())
    client.receive(Ready)
    gate.open.clear()
    gone = Client(endpoint)
    gone.send(Submit("b", [1, 2, 3], greedy(40)))
    until(lambda: engine.strategy.running)
    gone.close()
    until(lambda: not connection.inbox.empty())  # a heartbeat noticed the loss
    gate.open.set()
    until(lambda: not engine.has_work())
    until(lambda: client.receive(Heartbeat).stats.aborted == {"worker_lost": 1})
    assert gate.executor.num_steps < 10, "the lost client's request runs no further steps"
    assert engine.strategy.memory.num_held_blocks == 0


def test_a_failed_step_fails_only_its_requests(client, gate):
    gate.error = RuntimeError("out of memory")
    client.send(Submit("a", [1], greedy()))
    failed = client.receive(Failed)
    assert (failed.kind, failed.message) == ("failed", "RuntimeError: out of memory")
    gate.error = None
    client.send(Submit("b", [1], greedy(2)))
    assert client.answer("b")[1] == Finish.LENGTH


def test_a_sequence_that_fails_by_its_request_s_fault_is_rejected(client, gate, monkeypatch):
    def run(plan):
        failure = SequenceFailure("too complex", "structured_outputs")
        return {chunk.sequence.id: failure for chunk in plan.chunks}

    monkeypatch.setattr(gate.executor, "run", run)
    client.send(Submit("a", [1], greedy()))
    failed = client.receive(Failed)
    assert failed == Failed("a", "rejected", "too complex", "structured_outputs")


def test_only_consecutive_failures_count(client, gate):
    for number in range(MAX_FAILED_STEPS):
        gate.error = RuntimeError("now and then")
        client.send(Submit(f"bad{number}", [1], greedy()))
        assert client.receive(Failed).kind == "failed"
        gate.error = None
        client.send(Submit(f"good{number}", [1], greedy(1)))
        assert client.answer(f"good{number}")[1] == Finish.LENGTH


def test_an_exception_of_the_strategy_fails_only_its_request(client, engine, monkeypatch):
    monkeypatch.setattr(BeamSearch, "advance", lambda self, candidates: 1 / 0)
    client.send(Submit("a", [1, 2, 3], greedy()))
    client.send(Submit("beams", [4, 5], SamplingParams(max_tokens=5, num_beams=2)))
    client.send(Submit("b", [1, 2], greedy()))
    answers = {"a": [], "b": []}
    failures = []
    while not all(len(tokens) == 5 for tokens in answers.values()) or not failures:
        message = client.receive(Step | Failed)
        if isinstance(message, Failed):
            failures.append((message.id, message.kind, message.message))
            continue
        for id, output in message.outputs:
            answers[id] += output.token_ids
    assert answers == {"a": expected(0, [1, 2, 3], 5), "b": expected(3, [1, 2], 5)}
    assert failures == [("beams", "failed", "ZeroDivisionError: division by zero")]
    client.send(Submit("c", [1], greedy(2)))
    assert client.answer("c")[1] == Finish.LENGTH
    assert engine.strategy.memory.num_held_blocks == 0


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit("a panic")])
def test_an_exception_while_a_request_is_added_fails_only_that_request(
    client, engine, gate, monkeypatch, error
):
    add = engine.add

    def add_or_raise(prompt, *others):
        if prompt == [7]:
            raise error
        return add(prompt, *others)

    monkeypatch.setattr(engine, "add", add_or_raise)
    gate.open.clear()
    client.send(Submit("good", [1, 2, 3], greedy()))
    client.send(Submit("bad", [7], greedy()))
    gate.open.set()
    failed = client.receive(Failed)
    reason = f"{type(error).__name__}: {error}"
    assert (failed.id, failed.kind, failed.message) == ("bad", "failed", reason)
    client.send(Submit("bad", [1], greedy(2)))
    assert client.answer("bad") == (expected(1, [1], 2), Finish.LENGTH), "its id can be reused"


def test_invalid_messages_are_ignored(client):
    client.socket.send(b"\xc1 no msgpack")
    client.socket.send_multipart([b"two", b"frames"])
    client.send(Submit("a", [1], greedy(2)))
    assert client.answer("a")[1] == Finish.LENGTH


def test_a_socket_error_ends_the_engine(connection, engine, monkeypatch):
    monkeypatch.setattr(connection, "_receive", lambda *_: 1 / 0)
    client = Client(connection.endpoint)
    client.send(Hello())
    with pytest.raises(EngineUnavailableError, match="ZeroDivisionError"):
        Server(TextService(engine, connection), connection, max_waiting=2).serve_forever()
    connection.send(b"nobody", Dead("never blocks"))
    client.close()


def test_steps_that_keep_failing_end_the_engine(client, gate):
    gate.error = RuntimeError("broken device")
    for number in range(MAX_FAILED_STEPS - 1):
        client.send(Submit(f"{number}", [1], greedy()))
        client.receive(Failed)
    client.send(Submit("last", [1], greedy()))
    assert "broken device" in client.receive(Dead).reason


def test_aborts_and_heartbeats_work_during_a_long_run(client, engine, gate, connection):
    """The library executor computes whole answers in one run, calling `between_tokens`."""
    runs, received = [], []

    def submit(plan, between_tokens):
        started = time.monotonic()
        runs.append(plan)
        while plan.chunks[0].sequence.finish is None:
            between_tokens()
            assert time.monotonic() < started + 60, "messages are not read"
        received.append(connection.pulse.alive_at > started)
        return gate.executor.submit(plan, between_tokens)

    gate.submit = submit
    client.send(Submit("a", [1, 2, 3], greedy(40)))
    until(lambda: runs)
    client.send(Hello())
    client.receive(Ready)
    client.send(Abort("a"))
    until(lambda: received)
    assert received == [True]
    gate.submit = Gate.submit.__get__(gate)
    client.send(Submit("b", [1], greedy(2)))
    assert client.answer("b")[1] == Finish.LENGTH


@pytest.mark.parametrize("extra", [{"n": 3}, {"best_of": 3}], ids=str)
def test_a_request_of_several_answers_ends_with_the_last(client, engine, gate, connection, extra):
    """With `best_of`, all answers are sent, because the client ranks them."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, **extra)
    client.send(Submit("a", [1, 2, 3], params))
    answers = {index: [] for index in range(3)}
    finished = []
    while len(finished) < 3:
        for _, output in client.receive(Step).outputs:
            answers[output.index] += output.token_ids
            finished += [output.index] * (output.finish is not None)
    assert answers == {index: expected(index, [1, 2, 3], 4) for index in range(3)}
    assert sorted(finished) == [0, 1, 2]
    client.send(Submit("a", [1], greedy(1)))
    assert client.answer("a")[1] == Finish.LENGTH, "its id can be reused"


def test_a_single_answer_can_be_aborted(client, engine, gate, connection):
    gate.open.clear()
    client.send(Submit("a", [1, 2, 3], SamplingParams(n=2, max_tokens=9, ignore_eos=True)))
    until(lambda: engine.strategy.running)
    client.send(Abort("a", 0))
    client.send(Abort("a", 7))
    until(lambda: connection.inbox.qsize() == 2)
    gate.open.set()
    tokens = []
    while len(tokens) < 9:
        for _, output in client.receive(Step).outputs:
            assert output.index == 1
            tokens += output.token_ids
    assert tokens == expected(1, [1, 2, 3], 9)
    until(lambda: not engine.has_work())
    assert engine.strategy.memory.num_held_blocks == 0


def test_the_server_ends_with_the_error_of_a_lost_rank(engine, connection):
    connection.inbox.put((EVERYONE, ConnectionBroken(InsufficientMemoryError("rank 1: no room"))))
    with pytest.raises(InsufficientMemoryError, match="rank 1: no room"):
        Server(TextService(engine, connection), connection, max_waiting=2).serve_forever()
