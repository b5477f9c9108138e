"""One request from its JSON body to its record; which responses count as answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.load.record import Record, Timings
from loadtest.load.request import COMMON, Request, Shape
from loadtest.load.session import Session
from loadtest.servers.clients.schema import LmiSchema, OpenAISchema
from loadtest.servers.clients.transport import split_lines
from loadtest.servers.endpoint import Endpoint
from tests.loadtest.stub import Stub, lmi, openai, serving


def ask(answer: int = 3, **changes: Any) -> Request:
    return Request(5, Shape(2, answer, **changes), "the and", None, seed=9)


def send(stub: Stub, what: Request, schema: str = "lmi") -> tuple[Record, Session]:
    endpoint = Endpoint(url=stub.url, schema=schema, timeout_s=60)
    session = Session([what], endpoint.connect, endpoint.make_schema())
    transport = session.connect()
    taken = session.take()
    assert taken is what
    record = session.send(transport, taken)
    assert session.take() is None
    assert session.finished.is_set()
    transport.close()
    return record, session


def test_no_request_is_handed_out_after_the_time_to_stop(stub: Stub) -> None:
    endpoint = Endpoint(url=stub.url, schema="lmi", timeout_s=60)
    session = Session([ask()] * 1000, endpoint.connect, endpoint.make_schema(), stop_s=0.2)
    transport = session.connect()
    while (taken := session.take()) is not None:
        assert session.now_s < 1
        session.send(transport, taken)
    assert session.now_s >= 0.2
    assert 0 < len(session.records) < 1000
    assert session.finished.is_set()
    transport.close()


def test_an_answer_of_lmi(stub: Stub) -> None:
    record, session = send(stub, ask())
    assert (record.error, record.output_tokens, record.asked_tokens) == (None, 3, 3)
    assert record.prompt_tokens == 2, "as requested, if the server sends no count"
    assert len(session.gaps_s) == 2
    (body,) = stub.bodies
    assert body["stream"] is True
    assert body["parameters"]["ignore_eos_token"] is True
    assert "timings" not in body["parameters"], "only our server sends timings"


def test_an_answer_of_openai(stub: Stub) -> None:
    stub.script = openai
    record, session = send(stub, ask(answer=6), "openai")
    assert (record.error, record.output_tokens, record.prompt_tokens) == (None, 6, 7)
    assert len(session.gaps_s) == 2, "two tokens per chunk"
    (body,) = stub.bodies
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["model"] == "stub", "the name from /v1/models"


@pytest.mark.parametrize(("schema", "script"), [("lmi", lmi), ("openai", openai)])
def test_several_answers(stub: Stub, schema: str, script: Any) -> None:
    """Tokens are counted per sample, and gaps are between tokens of one sample."""
    stub.script = script
    record, session = send(stub, ask(answer=4, samples=3), schema)
    assert (record.error, record.output_tokens, record.asked_tokens) == (None, 12, 12)
    (body,) = stub.bodies
    fields = body if schema == "openai" else body["parameters"]
    assert (fields["n"], fields["seed"]) == (3, 9)
    assert len(session.gaps_s) == (3 if schema == "openai" else 0)


@pytest.mark.parametrize("schema", ["lmi", "openai"])
def test_beams(stub: Stub, schema: str) -> None:
    stub.script = openai if schema == "openai" else lmi
    record, _ = send(stub, ask(beams=4), schema)
    assert record.is_good
    (body,) = stub.bodies
    assert (body if schema == "openai" else body["parameters"])["num_beams"] == 4


def test_times_are_arrival_times(stub: Stub) -> None:
    def script(path: str, body: Any) -> Iterator[bytes | float]:
        first, second, last = lmi(path, body)
        yield from (0.05, first, 0.1, second, last)

    stub.script = script
    record, session = send(stub, ask())
    assert record.first_token_s is not None
    assert record.first_token_s >= 0.05
    assert record.stall_s is not None
    # Not exactly 0.1: the first record may be read late, which shortens the gap after it.
    assert record.first_token_s + record.stall_s >= 0.15
    assert record.latency_s >= record.first_token_s + record.stall_s
    assert max(session.gaps_s) == record.stall_s
    assert record.gap_s == pytest.approx(sum(session.gaps_s) / len(session.gaps_s))


def _lines(*records: object) -> Any:
    return lambda path, body: iter([json.dumps(record).encode() + b"\n" for record in records])


TOKEN = {"token": {"id": 1, "text": "x", "log_prob": -1.0}}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (_lines(TOKEN, TOKEN), "terminal record"),
        (
            _lines(TOKEN, {**TOKEN, "generated_text": "", "details": {"finish_reason": "error"}}),
            "finish_reason is error",
        ),
        (_lines({"token": {"error_msg": "no memory"}, "generated_text": ""}), "no memory"),
        (_lines(TOKEN, {"error": "busy", "code": 503}), "busy"),
        (lambda path, body: iter([b"<html>"]), "is not JSON"),
        (lambda path, body: iter([b"[1]"]), "not a JSON object"),
    ],
)  # fmt: skip
def test_responses_that_are_no_answers(stub: Stub, script: Any, error: str) -> None:
    stub.script = script
    record, session = send(stub, ask())
    assert not record.is_good
    assert error in (record.error or "")
    assert session.gaps_s == []


def test_an_error_in_an_event_stream_is_no_answer(stub: Stub) -> None:
    stub.script = lambda path, body: iter(
        [b'data: {"error": {"message": "out of memory"}}\n\n', b"data: [DONE]\n\n"]
    )
    record, _ = send(stub, ask(), "openai")
    assert "out of memory" in (record.error or "")


def test_a_truncated_stream_is_no_answer_even_after_its_last_record(stub: Stub) -> None:
    stub.breaks_off = True
    record, _ = send(stub, ask())
    assert "IncompleteRead" in (record.error or "")


def test_a_rejected_request(stub: Stub) -> None:
    stub.status = 503
    record, _ = send(stub, ask())
    assert (record.error, record.first_s) == ('503: {"error":"busy"}', None)


def test_connection_refused() -> None:
    with serving() as stub:
        pass
    record, _ = send(stub, ask())
    assert "ConnectionRefusedError" in (record.error or "")


@pytest.mark.parametrize("samples", [1, 2])
def test_connections_are_reused(stub: Stub, samples: int) -> None:
    """A stream and a document with a Content-Length leave the connection open."""
    endpoint = Endpoint(url=stub.url, timeout_s=60)
    session = Session([ask(samples=samples)] * 2, endpoint.connect, LmiSchema())
    transport = session.connect()
    while (request := session.take()) is not None:
        assert session.send(transport, request).is_good
    transport.close()
    assert stub.num_connections == 1


def test_a_session_ends_with_its_last_answer(stub: Stub) -> None:
    endpoint = Endpoint(url=stub.url, timeout_s=60)
    session = Session([ask()], endpoint.connect, LmiSchema())
    taken = session.take()
    assert taken is not None
    assert session.take() is None
    assert not session.finished.is_set()


def test_timings_come_from_the_server(stub: Stub) -> None:
    timings = {"arrived": 1.0, "admitted": 2.5, "first_token": 3.0, "finished": 4.0}
    details = {"finish_reason": "length", "generated_tokens": 1, "timings": timings}
    stub.script = _lines({**TOKEN, "generated_text": "x", "details": details})
    record, _ = send(stub, ask(1))
    assert record.timings == Timings(**timings)
    assert record.queue_s == 1.5


def test_lines_have_the_arrival_time_of_their_last_bytes() -> None:
    def parts() -> Iterator[bytes]:
        yield b"a"
        marks.append("second")
        yield b"b\nc\n\n"
        yield b"d"

    marks: list[str] = []
    found = list(split_lines(parts()))
    assert [line for _, line in found] == [b"ab", b"c", b"d"]
    assert found[0][0] == found[1][0], "both lines arrived together"


def test_limits_are_read_from_the_server(stub: Stub) -> None:
    endpoint = Endpoint(url=stub.url)
    assert endpoint.max_length() == 4096
    assert endpoint.words().tokens_per_word == 1.0
    assert endpoint.get("/nothing") is None
    silent = Endpoint(url="http://127.0.0.1:9")
    assert (silent.max_length(), silent.words().tokens_per_word) == (None, 1.0)
    assert len(set(COMMON)) == len(COMMON)


def test_paths_of_the_apis() -> None:
    assert Endpoint(url=None, path="/generate_stream").make_schema().path == "/generate_stream"
    assert (LmiSchema().path, OpenAISchema().path) == ("/invocations", "/v1/completions")
