"""The task engine: the strategies' batches, one outcome per job, and its socket."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from core.configuration.options import make_options
from core.configuration.task import Task
from core.errors import GenerationError, RequestError, StoppedError
from core.protocol.messages import (
    Abort,
    Failed,
    Heartbeat,
    Hello,
    Perform,
    Performed,
    Ready,
    Submit,
)
from core.sampling import SamplingParams
from engine.serve.connection import Connection
from engine.serve.server import Server
from engine.serve.task_service import TaskService
from engine.tasks.build import build_task_engine
from engine.tasks.performer import Answer, Description, Job
from strategies.group import SequenceGroup
from tests.engine.serve.serving import Client


class Echo:
    """Answers with the request body, or as the body says."""

    description = Description(architecture="Echo")

    def __init__(self):
        self.batches = []
        self.between = lambda: None
        self.open = threading.Event()
        self.open.set()

    def perform(self, jobs, between_runs):
        self.open.wait(60)
        self.batches.append([job.body.decode() for job in jobs])
        between_runs()
        self.between()
        return [self.outcome(job, job.body.decode()) for job in jobs]

    def outcome(self, job, body):
        match body:
            case "endless":
                while job.send(Answer(b"part", "text/plain")):
                    time.sleep(0.001)
                return Answer(b"")
            case "wrong":
                return RequestError("inputs", "are wrong")
            case "fail":
                return ValueError("failed")
            case "lost":
                raise torch.AcceleratorError("gone")
            case "stop":
                raise StoppedError
            case _:
                return Answer(body.encode(), "text/plain", 201, {"x-of": "handler"})


@pytest.fixture
def echo(monkeypatch):
    echo = Echo()
    monkeypatch.setattr("engine.tasks.build.load_handler", lambda *_: echo)
    return echo


@pytest.fixture
def make(echo, monkeypatch, tmp_path):
    """Return a function that makes an engine with these options."""

    def make(**options):
        monkeypatch.chdir(tmp_path)
        task = Task(kind="handler", name=str(tmp_path / "model.py"))
        return build_task_engine(task, tmp_path, make_options({"device": "cpu", **options}))

    return make


def run(engine, *bodies, now=0.0):
    ids = [engine.add(Job(body.encode()), 0.0) for body in bodies]
    outputs = []
    while engine.has_work():
        outputs += engine.advance(now)
    return ids, outputs


def test_none_runs_one_job_at_a_time(make, echo):
    engine = make()
    assert engine.facts.batching == "none"
    ids, outputs = run(engine, "a", "b", "c")
    assert echo.batches == [["a"], ["b"], ["c"]]
    assert [output.request_id for output in outputs] == ids


def test_dynamic_runs_a_full_batch_or_those_that_arrived_in_time(make, echo):
    engine = make(batch_size=2, max_batch_delay=1000)
    for body in ("a", "b", "c"):
        engine.add(Job(body.encode()), 0.0)
    assert len(engine.advance(0.0)) == 2
    assert engine.advance(0.5) == []
    assert engine.wake_at() == 1.0
    assert len(engine.advance(1.0)) == 1
    assert echo.batches == [["a", "b"], ["c"]]
    assert not engine.has_work()


@pytest.mark.parametrize("method", ["turns", "commit"])
def test_an_exception_of_the_strategy_fails_only_its_job(make, monkeypatch, method):
    engine = make(batch_size=4, max_batch_delay=0)
    first, bad, last = (engine.add(Job(body), 0.0) for body in (b"a", b"b", b"c"))
    original = getattr(SequenceGroup, method)

    def raises(group, *arguments):
        if group.request.id == bad:
            raise ZeroDivisionError("a bug")
        return original(group, *arguments)

    monkeypatch.setattr(SequenceGroup, method, raises)
    outcomes = {}
    while engine.has_work():
        outcomes |= {output.request_id: output.outcome for output in engine.advance(9.0)}
    assert [outcomes[id].body for id in (first, last)] == [b"a", b"c"]
    assert isinstance(outcomes[bad], GenerationError)
    assert str(outcomes[bad]) == "ZeroDivisionError: a bug"
    assert not engine._jobs


def test_an_aborted_job_is_never_performed(make, echo):
    engine = make(batch_size=4, max_batch_delay=0)
    first, second = (engine.add(Job(body), 0.0) for body in (b"a", b"b"))
    engine.abort(first)
    engine.abort(first)
    engine.abort(99)
    assert [output.request_id for output in engine.advance(0.0)] == [second]
    assert echo.batches == [["b"]]
    assert not engine._jobs, "the body of an aborted job is not kept"


def test_a_job_aborted_while_it_runs_has_no_output(make, echo):
    engine = make(batch_size=4, max_batch_delay=0)
    first, second = (engine.add(Job(body), 0.0) for body in (b"a", b"b"))
    echo.between = lambda: engine.abort(first)
    assert [output.request_id for output in engine.advance(0.0)] == [second]
    assert not engine.has_work()
    assert engine.strategy.memory.num_held_blocks == 0


def test_requests_may_arrive_while_others_run(make, echo):
    engine = make(batch_size=4, max_batch_delay=0)
    engine.add(Job(b"a"), 0.0)
    echo.between = lambda: len(echo.batches) > 1 or engine.add(Job(b"b"), 0.0)
    while engine.has_work():
        engine.advance(0.0)
    assert echo.batches == [["a"], ["b"]]


@pytest.fixture
def client(make, echo, tmp_path):
    """A client of a server with a queue of two."""
    with Connection(f"ipc://{tmp_path}/e") as connection:

        def serve():
            with pytest.raises(StoppedError):
                Server(TaskService(make(), connection), connection, max_waiting=2).serve_forever()

        thread = threading.Thread(target=serve)
        thread.start()
        client = Client(connection.endpoint)
        yield client
        echo.open.set()
        client.send(Perform("stop", b"stop"))
        thread.join(60)
        client.close()
        assert not thread.is_alive()


def test_tasks_over_the_socket(client):
    client.send(Hello())
    facts = client.receive(Ready).facts
    assert (facts.executor, facts.architecture, facts.max_sequences) == ("task", "Echo", 1)
    client.send(Perform("1", b"hello"))
    assert client.receive(Performed) == Performed(
        "1", b"hello", "text/plain", 201, {"x-of": "handler"}
    )
    client.send(Perform("2", b"wrong"))
    assert client.receive(Failed) == Failed("2", "rejected", "are wrong", "inputs")
    client.send(Perform("3", b"fail"))
    assert client.receive(Failed) == Failed("3", "failed", "ValueError: failed")
    client.send(Submit("4", [1], SamplingParams()))
    assert client.receive(Failed).kind == "rejected", "a task engine generates no text"
    client.send(Perform("1", b"again"))
    assert client.receive(Performed).id == "1", "an id is free once its request has ended"


def test_parts_are_sent_until_the_request_is_aborted(client):
    client.send(Perform("1", b"endless"))
    part = Performed("1", b"part", "text/plain", is_last=False)
    assert [client.receive(Performed) for _ in range(3)] == [part] * 3
    client.send(Perform("2", b"hello"))
    client.send(Abort("1"))
    while (answer := client.receive(Performed)) == part:
        pass
    assert (answer.id, answer.body) == ("2", b"hello"), "an aborted request has no final message"


def test_a_full_queue_rejects_and_an_abort_makes_room(client, echo):
    echo.open.clear()
    client.send(Perform("1", b"1"))
    while client.receive(Heartbeat).step_age_s < 0.6:
        pass  # the step loop is blocked, heartbeats continue
    for id in ("2", "3", "4"):
        client.send(Perform(id, id.encode()))
    client.send(Abort("2"))
    client.send(Perform("5", b"5"))
    beats = [client.receive(Heartbeat).step_age_s for _ in range(3)]
    assert beats == sorted(beats), "the same step still runs, so all requests wait"
    echo.open.set()
    assert client.receive(Failed).kind == "overloaded"
    assert [client.receive(Performed).id for _ in range(3)] == ["1", "3", "5"]


def test_a_lost_device_ends_the_engine(make):
    with pytest.raises(torch.AcceleratorError):
        run(make(), "lost")
