"""Grammars are compiled outside the step loop: other requests continue, aborts work."""

from __future__ import annotations

import threading

import pytest

from core.errors import RequestError
from core.protocol.messages import Abort, Failed, Heartbeat, Hello, Step, Submit
from core.sampling import Finish, SamplingParams
from core.structured_outputs import StructuredOutputsParams
from engine.engine import Engine
from engine.sampling.grammars import Grammars
from tests.engine.serve.serving import (
    FACTS,
    Client,
    Gate,
    expected,
    greedy,
    until,
)
from tests.strategies.fakes import strategy_of


class Slow(Grammars):
    """Fake grammars of regular expressions. Compilation blocks until the test releases it."""

    def __init__(self):
        self.may_end = threading.Event()
        self.began = threading.Event()
        self.known = set()
        self.errors = {"wrong": RequestError("structured_outputs", "so wrong"),
                       "broken": MemoryError("none left")}  # fmt: skip

    def part(self, params, num_prompt_tokens):
        """Return none, since all grammars are kept and the executor needs none."""

    def is_compiled(self, form):
        if form.regex == "no grammar":
            raise RequestError("structured_outputs", "has none")
        return form.regex in self.known

    def matcher(self, form):
        if form.regex not in self.known:
            self.began.set()
            assert self.may_end.wait(60)
        if form.regex in self.errors:
            raise self.errors[form.regex]
        self.known.add(form.regex)


@pytest.fixture
def grammars():
    grammars = Slow()
    yield grammars
    grammars.may_end.set()


@pytest.fixture
def engine(grammars):
    return Engine(strategy_of("paged"), Gate(), FACTS, features=(grammars,))


def constrained(regex="a", max_tokens=5):
    form = StructuredOutputsParams(regex=regex)
    return SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=form)


def test_other_requests_continue_during_compilation(client, grammars):
    client.send(Submit("slow", [1, 2], constrained()))
    assert grammars.began.wait(60)
    client.send(Submit("free", [1, 2, 3], greedy()))
    assert client.answer("free") == (expected(0, [1, 2, 3], 5), Finish.LENGTH)
    grammars.may_end.set()
    assert client.answer("slow")[0] == until_end(expected(1, [1, 2], 5))
    grammars.may_end.clear()
    client.send(Submit("known", [1, 2], constrained()))
    assert client.answer("known")[0] == until_end(expected(2, [1, 2], 5))


def until_end(tokens):
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


def test_aborting_during_compilation(client, grammars, engine):
    client.send(Submit("a", [1, 2], constrained()))
    assert grammars.began.wait(60)
    client.send(Submit("a", [1, 2], greedy()))
    assert client.receive(Failed).message == "this id is in use"
    client.send(Abort("a"))
    client.send(Submit("b", [1], greedy(2)))
    assert client.answer("b")[1] == Finish.LENGTH
    grammars.may_end.set()
    until(lambda: "a" in grammars.known)
    client.send(Submit("c", [1], constrained(max_tokens=2)))
    assert client.answer("c")[0] == until_end(expected(1, [1], 2)), "c is sequence 1, after b"
    assert engine.strategy.memory.num_held_blocks == 0


def test_a_client_disconnects_during_compilation(client, endpoint, grammars, engine, connection):
    client.send(Hello())
    gone = Client(endpoint)
    gone.send(Submit("a", [1, 2], constrained()))
    assert grammars.began.wait(60)
    gone.close()
    until(lambda: client.receive(Heartbeat).stats.aborted == {"worker_lost": 1})
    grammars.may_end.set()
    until(lambda: "a" in grammars.known)
    client.send(Submit("c", [1], constrained(max_tokens=2)))
    assert client.answer("c")[0] == until_end(expected(0, [1], 2)), "c is sequence 0, the first"


@pytest.mark.parametrize(
    ("regex", "kind", "message", "field"),
    [
        ("wrong", "rejected", "so wrong", "structured_outputs"),
        ("broken", "failed", "MemoryError: none left", ""),
        ("no grammar", "rejected", "has none", "structured_outputs"),
    ],
)
def test_invalid_grammars(client, grammars, engine, regex, kind, message, field):
    grammars.may_end.set()
    client.send(Submit("a", [1, 2], constrained(regex)))
    failed = client.receive(Failed)
    assert (failed.id, failed.kind, failed.message, failed.field) == ("a", kind, message, field)
    client.send(Submit("a", [1], greedy(2)))
    assert client.answer("a")[0] == expected(0, [1], 2)


def test_requests_in_compilation_count_as_waiting(client, grammars):
    """The engine has four slots and a queue of two requests."""
    for number in range(7):
        client.send(Submit(f"{number}", [1], constrained()))
    failed = client.receive(Failed)
    assert (failed.id, failed.kind) == ("6", "overloaded")
    grammars.may_end.set()
    ended = set()
    while len(ended) < 6:
        ended |= {id for id, output in client.receive(Step).outputs if output.finish}
    assert ended == set("012345")
