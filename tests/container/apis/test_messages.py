"""Anthropic's Messages API: requests as Anthropic's client sends them, and the responses it reads.

The client itself is not a dependency: it was run by hand against the same application.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from container.front_end.app import create_app
from container.security.api_keys import read_api_keys
from container.security.authentication import Gate
from container.wire.engine_client import EngineClient
from core.configuration.options import Options
from core.protocol.messages import Submit
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer
from tests.container.apis.test_chat import CALL, prompt, submitted
from tests.container.apis.test_structured import SCHEMA, grammar
from tests.container.clients import sagemaker_runtime
from tests.container.conftest import EOS, Serve
from tests.container.fake_engine import FakeEngine, fails, says

USER = {"role": "user", "content": "Q"}
TOOLS = [{"name": "f", "description": "d", "input_schema": SCHEMA}]
HEADERS = {"anthropic-version": "2023-06-01", "x-api-key": "none", "accept": "application/json"}


def ask(http: FlaskClient, path: str = "", **fields: Any) -> TestResponse:
    body = {"max_tokens": 20, "messages": [USER], "model": "demo", **fields}
    if path:
        del body["max_tokens"]
    return http.post(f"/v1/messages{path}", json=body, headers=HEADERS)


def events(response: TestResponse) -> list[dict[str, Any]]:
    """Return the data of a stream's events. Each event must be named after the type in its data."""
    assert (response.status_code, response.mimetype) == (200, "text/event-stream")
    *parts, end = response.text.split("\n\n")
    assert end == ""
    records: list[dict[str, Any]] = []
    for part in parts:
        name, data = part.split("\n")
        records.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {records[-1]['type']}"
    return records


@pytest.fixture
def thinker(serve: Serve, engine: FakeEngine, tokenizer: Tokenizer) -> FlaskClient:
    """A model that reasons, says something and calls a function."""
    engine.script = says([*tokenizer.encode(f"<think>\nWell</think>\n\nSo: {CALL}"), EOS])
    return serve(reasoning_parser="qwen3", tool_call_parser="hermes")


def test_a_message(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    response = ask(http, system="Be.", temperature=0.5, top_k=3)
    body = response.get_json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "Hi there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 12, "output_tokens": 9},
    }
    assert prompt(engine, tokenizer) == "s:Be.;u:Q;a:"
    params = submitted(engine).params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 20)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "stop"),
    [
        ({}, "Hi there", ("end_turn", None)),
        ({"max_tokens": 2}, "Hi", ("max_tokens", None)),
        ({"stop_sequences": ["x", "the"]}, "Hi ", ("stop_sequence", "the")),
    ],
)
def test_why_a_message_stops(
    http: FlaskClient, stream: bool, fields: dict[str, Any], text: str, stop: tuple[str, str | None]
) -> None:
    response = ask(http, stream=stream, **fields)
    if not stream:
        body = response.get_json()
        assert body["content"] == [{"type": "text", "text": text}]
        assert (body["stop_reason"], body["stop_sequence"]) == stop
        return
    *_, delta, last = records = events(response)
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == stop
    assert last == {"type": "message_stop"}
    texts = [
        record["delta"]["text"] for record in records if record["type"] == "content_block_delta"
    ]
    assert "".join(texts) == text


def test_events_are_in_order(http: FlaskClient) -> None:
    records = events(ask(http, stream=True))
    assert list(dict.fromkeys(record["type"] for record in records)) == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start = records[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert start["usage"]["input_tokens"] == 6
    assert records[1]["content_block"] == {"type": "text", "text": ""}
    assert records[-2]["usage"] == {"input_tokens": 6, "output_tokens": 9}


def test_thinking_text_and_tool_use_are_blocks(thinker: FlaskClient) -> None:
    body = ask(thinker, tools=TOOLS, max_tokens=90).get_json()
    thinking, text, call = body["content"]
    assert thinking == {"type": "thinking", "thinking": "Well", "signature": ""}
    assert text == {"type": "text", "text": "So:"}
    assert re.fullmatch("[a-z0-9]{9}", call.pop("id")), "an id that Mistral's templates accept"
    assert call == {"type": "tool_use", "name": "f", "input": {"x": 1}}
    assert body["stop_reason"] == "tool_use"


def test_thinking_text_and_tool_use_are_streamed(thinker: FlaskClient) -> None:
    records = events(ask(thinker, tools=TOOLS, max_tokens=90, stream=True))
    starts = [record for record in records if record["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    assert (starts[2]["content_block"]["name"], starts[2]["content_block"]["input"]) == ("f", {})
    deltas = [record for record in records if record["type"] == "content_block_delta"]
    said = ["".join(d["delta"].get(name, "") for d in deltas)
            for name in ("thinking", "text", "partial_json")]  # fmt: skip
    assert said == ["Well", "So:", '{"x":1}']
    assert sum(record["type"] == "content_block_stop" for record in records) == 3
    assert records[-2]["delta"]["stop_reason"] == "tool_use"


def test_the_answer_is_part_of_the_next_request(
    thinker: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    answer = ask(thinker, tools=TOOLS, max_tokens=90).get_json()["content"]
    result = {"type": "tool_result", "tool_use_id": answer[-1]["id"], "content": "R"}
    turns = [USER, {"role": "assistant", "content": answer}]
    turns.append({"role": "user", "content": [{"type": "text", "text": "T"}, result]})
    assert ask(thinker, tools=TOOLS, messages=turns).status_code == 200
    assert prompt(engine, tokenizer) == "f;u:Q;a:So:;t:R;u:T;a:"


def test_blocks(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    cached = {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "A"}, cached]},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "C"}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "R"}]},
            {"type": "tool_result", "tool_use_id": "2", "is_error": True}]},
    ]  # fmt: skip
    assert ask(http, messages=messages, system=[cached]).status_code == 200
    assert prompt(engine, tokenizer) == "s:B;u:A\nB;a:C;t:R;t:;a:"


def test_an_assistants_last_message_is_continued(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    started = {"role": "assistant", "content": "Well, "}
    assert ask(http, messages=[USER, started]).get_json()["content"][0]["text"] == "Hi there"
    assert prompt(engine, tokenizer) == "u:Q;a:Well, "


def test_counting_tokens(
    http: FlaskClient, serve: Serve, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    assert ask(http, "/count_tokens").get_json() == {"input_tokens": 6}
    with_tools = ask(http, "/count_tokens", tools=TOOLS, system="Be.").get_json()
    assert not engine.of_type(Submit)
    assert ask(serve(tool_call_parser="hermes"), tools=TOOLS, system="Be.").status_code == 200
    assert with_tools == {"input_tokens": len(submitted(engine).prompt_token_ids)}
    assert ask(http, "/count_tokens", stream=True).status_code == 400


def test_tool_choices(serve: Serve, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    http = serve(tool_call_parser="hermes")

    def is_forced(**choice: Any) -> bool:
        tools = [*TOOLS, {"type": "custom", "name": "g", "input_schema": {"type": "object"}}]
        assert ask(http, tools=tools, tool_choice=choice).status_code == 200
        return submitted(engine).params.structured_outputs is not None

    assert not is_forced(type="auto")
    assert prompt(engine, tokenizer) == "f;g;u:Q;a:"
    assert is_forced(type="any")
    assert "*" in grammar(engine).split("\n")[0], "one or more calls"
    assert is_forced(type="any", disable_parallel_tool_use=True)
    assert "*" not in grammar(engine).split("\n")[0]
    assert is_forced(type="tool", name="f")
    assert '\\"g\\"' not in grammar(engine)
    assert not is_forced(type="none")
    assert prompt(engine, tokenizer) == "u:Q;a:"


def test_a_limit_to_one_call_gives_a_warning_unless_a_call_is_forced(serve: Serve) -> None:
    http = serve(tool_call_parser="hermes")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    warned = ask(http, tools=TOOLS, tool_choice=choice)
    assert warned.headers["X-Longshore-Warning"] == (
        "tool_choice.disable_parallel_tool_use has no effect with this tool_choice"
    )
    forced = ask(http, tools=TOOLS, tool_choice={**choice, "type": "any"})
    assert "X-Longshore-Warning" not in forced.headers


def test_the_format_of_the_answer(http: FlaskClient, engine: FakeEngine) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    assert ask(http, output_config={"format": form}).status_code == 200
    (constraint,) = json.loads(grammar(engine))["grammars"]
    assert constraint["json_schema"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ";"),
        ({"thinking": {"type": "disabled"}}, "False;"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True;"),
        ({"output_config": {"effort": "low"}}, "True;low"),
    ],
)
def test_templates_see_whether_to_think(
    client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer,
    fields: dict[str, Any], shown: str,
) -> None:  # fmt: skip
    template = ChatTemplate(
        "{{ messages[0].content }};{{ enable_thinking }};{{ reasoning_effort }}"
    )
    http = create_app(client, tokenizer, Options(), "demo", template).test_client()
    assert ask(http, **fields).status_code == 200
    assert prompt(engine, tokenizer) == f"Q;{shown}"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: expected at least one message"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: expected one of user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: expected a string or a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
     "messages[0].content[0]: expected a complete block of type text, image or tool_result"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use"}]}, USER]},
     "messages[1].content[0]: expected a complete block of type text, thinking or tool_use"),
    ({"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document"}]}]}]},
     "messages[0].content[0].content[0]: expected a complete block of type text or image"),
    ({"system": [{"type": "document"}]}, "system[0]: expected a complete block of type text"),
    ({"system": [{"type": "image"}]}, "system[0].type: only messages of the user and results of"),
    ({"messages": [{"role": "system", "content": [{"type": "image"}]}, USER]},
     "messages[0].content[0].type: only messages of the user and results of tools"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type: web_search"),
    ({"tools": [{}]}, "tools[0].name: expected a string"),
    ({"tools": [{"name": "f", "input_schema": 1}]}, "tools[0].input_schema: expected a JSON"),
    ({"tools": TOOLS}, "tools: set option.tool_call_parser"),
    ({"tools": TOOLS, "tool_choice": {"type": "all"}}, "tool_choice: expected the type auto, any"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "no function 'g'"),
    ({"tools": TOOLS, "tool_choice": {"type": "any"}, "guided_regex": "a"}, "combined"),
    ({"thinking": {"type": "deep"}}, "thinking.type: expected one of enabled, adaptive"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format: expected the type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, "guided_regex": "a"},
     "output_config.format: cannot be combined"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences: has 17 stop strings"),
    ({"max_tokens": 99}, "max_tokens: this model's maximum context length"),
    ({"mcp_servers": [{}]}, "mcp_servers: not supported"),
    ({"stop": "x"}, "stop: no such field"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_invalid_requests(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], message: str
) -> None:
    response = ask(http, **fields)
    assert response.status_code == 400
    body = response.get_json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]
    assert not engine.of_type(Submit)


def test_failures_have_anthropics_format(http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = fails("overloaded", "full")
    for stream in (False, True):
        response = ask(http, stream=stream)
        error = {"type": "overloaded_error", "message": "full"}
        assert (response.status_code, response.get_json()) == (
            503, {"type": "error", "error": error},
        )  # fmt: skip
    engine.script = fails("failed", "no luck", after=[65])
    last = events(ask(http, stream=True))[-1]
    assert last == {"type": "error", "error": {"type": "api_error", "message": "no luck"}}
    missing = http.post("/openai/v1/messages/nope").get_json()
    assert missing["error"]["type"] == "not_found_error"


def test_the_api_key(
    client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer, template: ChatTemplate,
    tmp_path: Any,
) -> None:  # fmt: skip
    """Anthropic's client sends the key in its own header."""
    path = tmp_path / "keys"
    path.write_text("secret name=a\n")
    gate = Gate(read_api_keys(path))
    app = create_app(client, tokenizer, Options(), "demo", template, gate=gate)
    http = app.test_client()
    refused = ask(http)
    assert refused.status_code == 401
    assert refused.get_json()["error"]["type"] == "authentication_error"
    body = {"max_tokens": 2, "messages": [USER], "model": "demo"}
    accepted = http.post("/v1/messages", json=body, headers={**HEADERS, "x-api-key": "secret"})
    assert accepted.status_code == 200


def test_messages_through_sagemakers_route(serve: Serve) -> None:
    body = json.dumps({"max_tokens": 2, "messages": [USER], "model": "demo"})
    with closing(sagemaker_runtime(serve(local_runtime_api=True))) as client:
        for path, key in (("/v1/messages", "content"), ("/v1/messages/count_tokens", None)):
            answer = client.invoke_endpoint(
                EndpointName="any", ContentType="application/json",
                Body=body if key else json.dumps({"messages": [USER]}),
                CustomAttributes=f"route={path}",
            )  # fmt: skip
            assert (key or "input_tokens") in json.load(answer["Body"])
