"""Streaming handlers: parts are sent as they come, and abandoned generators are closed."""

from __future__ import annotations

import gc
import sys
from functools import partial

import pytest

from engine.tasks.performer import Answer
from tests.engine.tasks.conftest import job, perform

STREAMS = {
    "generator": """
def handle(inputs):
    ready.append(inputs.is_empty())
    if inputs.is_empty():
        return
    yield from parts(inputs.get_as_json())
""",
    "output": """
def handle(inputs):
    ready.append(inputs.is_empty())
    if not inputs.is_empty():
        return Output().add_stream_content(parts(inputs.get_as_json()))
""",
    "coroutine": """
async def handle(inputs):
    ready.append(inputs.is_empty())
    return None if inputs.is_empty() else parts(inputs.get_as_json())
""",
    "async generator": """
async def handle(inputs):
    ready.append(inputs.is_empty())
    if inputs.is_empty():
        return
    for part in parts(inputs.get_as_json()):
        await asyncio.sleep(0)
        yield part
""",
    "async output": """
async def later(count):
    for part in parts(count):
        await asyncio.sleep(0)
        yield part

def handle(inputs):
    ready.append(inputs.is_empty())
    if not inputs.is_empty():
        return Output().add_stream_content(later(inputs.get_as_json()))
""",
}
PARTS = """
import asyncio
from djl_python import Output

ready, closed = [], []

def parts(count):
    try:
        for number in range(count):
            yield {"number": number}
        if count == 3:
            raise ValueError("three")
        yield "text"
    finally:
        closed.append(count)
"""


@pytest.mark.parametrize("form", STREAMS)
def test_parts_are_sent_as_they_come(handler, form):
    engine = handler(PARTS + STREAMS[form], batch_size=4)
    assert sys.modules["model"].ready == [True]
    sent = {1: [], 2: [], 3: []}

    def send(part, count):
        sent[count].append(part)
        return True

    outcomes = perform(engine, *(job(count, partial(send, count=count)) for count in sent))
    lines = [Answer(b'{"number": %d}\n' % at, "application/jsonlines") for at in range(3)]
    text = Answer(b"text", "text/plain; charset=utf-8")
    assert sent == {1: [lines[0], text], 2: [*lines[:2], text], 3: lines}
    assert outcomes[:2] == [Answer(b"", text.content_type)] * 2, "the final message has no body"
    assert isinstance(outcomes[2], ValueError)


@pytest.mark.parametrize("form", STREAMS)
def test_an_abandoned_stream_is_closed(handler, form):
    engine = handler(PARTS + STREAMS[form])
    sent = []

    def send(part):
        sent.append(part)
        return len(sent) < 2

    perform(engine, job(9, send))
    assert len(sent) == 2
    gc.collect()  # closes a generator inside another
    assert sys.modules["model"].closed == [9]


def test_status_and_headers_of_a_stream(handler):
    engine = handler(
        """
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return
    if inputs.get_as_json() == "head":
        output = Output(201).add_property("content-type", "text/x").add_property("X-Y", "z")
        return output.add_stream_content(iter([b"a", {"b": 1}]))
    return (Output(202).add(part, key="data").add_property("X-Y", part) for part in "ab")
"""
    )
    sent = []
    perform(engine, job("head", lambda part: not sent.append(part)))
    headers = {"X-Y": "z"}
    assert sent == [
        Answer(b"a", "text/x", 201, headers),
        Answer(b'{"b": 1}\n', "text/x", 201, headers),
    ]
    sent.clear()
    perform(engine, job("parts", lambda part: not sent.append(part)))
    assert [(part.body, part.code, part.headers) for part in sent] == [
        (b"a", 202, {"X-Y": "a"}),
        (b"b", 202, {"X-Y": "b"}),
    ]


def test_a_stream_without_parts_is_an_empty_answer(handler):
    engine = handler("def handle(inputs):\n    return iter([])\n")
    assert perform(engine, job({}, lambda part: True))[0].body == b""
