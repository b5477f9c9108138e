"""Token counts, finish reasons and errors, as the contract page compares them with vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from core.output import Output
from core.protocol.messages import Step, Submit
from core.sampling import Finish
from core.text.tokenizer import Tokenizer
from tests.container.apis.test_chat import TOOLS, USER, events
from tests.container.conftest import EOS, Serve
from tests.container.fake_engine import FakeEngine, fails, says

CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": [USER]})
COMPLETION: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "Q"})
APIS = pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION], ids=["chat", "completions"])
ANSWERS: list[tuple[dict[str, Any], str, str | None, int]] = [
    ({}, "stop", None, len("Hi there") + 1),
    ({"max_tokens": 2}, "length", None, 2),
    ({"stop": ["x", "the"]}, "stop", "the", len("Hi the")),
    ({"stop": "the", "include_stop_str_in_output": True}, "stop", "the", len("Hi the")),
    ({"n": 2}, "stop", None, 2 * (len("Hi there") + 1)),
]
"""The fields of a request, and the finish reason, stop reason and number of tokens it must get."""


@APIS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "finish", "stop", "tokens"), ANSWERS)
def test_finish_reasons_and_token_counts(
    http: FlaskClient, path: str, body: dict[str, Any], stream: bool, fields: dict[str, Any],
    finish: str, stop: str | None, tokens: int,
) -> None:  # fmt: skip
    if not stream:
        answer = http.post(path, json={**body, **fields}).get_json()
        ends, usage = answer["choices"], answer["usage"]
    else:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(http.post(path, json={**body, **options, **fields}))
        choices = [chunk["choices"][0] for chunk in chunks]
        ends = [choice for choice in choices if choice["finish_reason"]]
        usage = last["usage"]
    assert {(end["finish_reason"], end["stop_reason"]) for end in ends} == {(finish, stop)}
    assert len(ends) == fields.get("n", 1)
    assert usage["completion_tokens"] == tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + tokens


@APIS
def test_a_stop_token_is_the_stop_reason(
    http: FlaskClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield Step([(submit.id, Output(0, (72, 105), (-0.5, -0.5), Finish.STOP))])

    engine.script = script
    (choice,) = http.post(path, json={**body, "stop_token_ids": [105]}).get_json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 105)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "f"}}, "stop"),
    ],
)
def test_the_finish_reason_of_a_tool_call(
    serve: Serve, engine: FakeEngine, tokenizer: Tokenizer, stream: bool, choice: Any, reason: str
) -> None:
    engine.script = says([*tokenizer.encode('{"name": "f", "parameters": {}}'), EOS])
    path, body = CHAT
    http = serve(tool_call_parser="llama3_json")
    body = {**body, "tools": TOOLS, "tool_choice": choice, "stream": stream}
    response = http.post(path, json=body)
    record = events(response)[-1] if stream else response.get_json()
    assert record["choices"][0]["finish_reason"] == reason


@APIS
def test_errors(http: FlaskClient, engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
    refused = http.post(path, json={**body, "temperature": -1})
    error = refused.get_json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (refused.status_code, error["code"], error["param"]) == (400, 400, "temperature")
    assert error["type"] == "invalid_request_error"
    engine.script = fails("failed", "no luck")
    failed = http.post(path, json=body)
    error = failed.get_json()["error"]
    assert (failed.status_code, error["code"], error["type"]) == (424, 424, "server_error")
