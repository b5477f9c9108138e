"""OpenAI's responses, as OpenAI's client asks for them and reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pydantic
import pytest
from flask.testing import FlaskClient

from core.protocol.messages import Submit
from core.text.tokenizer import Tokenizer
from tests.container.apis.test_chat import CALL, prompt, submitted
from tests.container.apis.test_structured import SCHEMA, grammar
from tests.container.clients import openai_client, sagemaker_runtime
from tests.container.conftest import EOS, Serve
from tests.container.fake_engine import FakeEngine, fails, says

TOOLS: Any = [{"type": "function", "name": "f", "parameters": SCHEMA, "description": "d"}]


@pytest.fixture
def demo(http: FlaskClient) -> Iterator[openai.OpenAI]:
    with openai_client(http) as client:
        yield client


@pytest.fixture
def thinker(serve: Serve, engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    """A model that reasons, says something and calls a function."""
    engine.script = says([*tokenizer.encode(f"<think>\nWell</think>\n\nSo: {CALL}"), EOS])
    with openai_client(serve(reasoning_parser="qwen3", tool_call_parser="hermes")) as client:
        yield client


def test_a_response(demo: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    response = demo.responses.create(
        model="demo", input="Q", instructions="Be.", metadata={"a": "b"}, temperature=0.5
    )
    assert (response.output_text, response.status) == ("Hi there", "completed")
    (message,) = response.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "completed")
    assert response.usage is not None
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (12, 9, 21)
    assert (response.instructions, response.metadata) == ("Be.", {"a": "b"})
    assert (response.model, response.temperature, response.incomplete_details) == (
        "demo", 0.5, None,
    )  # fmt: skip
    assert response.id.startswith("resp_")
    assert prompt(engine, tokenizer) == "s:Be.;u:Q;a:"
    assert submitted(engine).params.temperature == 0.5


def test_a_response_that_is_cut_off(demo: openai.OpenAI) -> None:
    response = demo.responses.create(model="demo", input="Q", max_output_tokens=2)
    assert (response.output_text, response.status) == ("Hi", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].to_dict()["status"] == "incomplete"


EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def test_events_are_in_order(demo: openai.OpenAI) -> None:
    events = list(demo.responses.create(model="demo", input="Q", stream=True))
    assert list(dict.fromkeys(event.type for event in events)) == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hi there"
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert done.text == "Hi there"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "Hi there"
    assert last.response.usage is not None
    begin = events[0]
    assert begin.type == "response.created"
    assert (begin.response.status, begin.response.usage) == ("in_progress", None)
    assert begin.response.id == last.response.id


def test_the_bytes_of_a_stream(http: FlaskClient) -> None:
    response = http.post("/v1/responses", json={"input": "Q", "stream": True})
    assert response.mimetype == "text/event-stream"
    events = response.text.split("\n\n")
    assert events.pop() == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_the_clients_own_stream_helper(demo: openai.OpenAI) -> None:
    with demo.responses.stream(model="demo", input="Q") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert final.output_text == "Hi there"


def test_a_stream_that_is_cut_off_ends_incomplete(demo: openai.OpenAI) -> None:
    *_, done, last = demo.responses.create(
        model="demo", input="Q", max_output_tokens=2, stream=True
    )
    assert done.type == "response.output_item.done"
    assert done.item.to_dict()["status"] == "incomplete"
    assert last.type == "response.incomplete"
    assert last.response.output_text == "Hi"


def test_reasoning_text_and_calls_are_items(thinker: openai.OpenAI) -> None:
    response = thinker.responses.create(
        model="demo", input="Q", tools=TOOLS, reasoning={"effort": "low"}
    )
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Well"
    assert message.type == "message"
    assert response.output_text == "So:"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("f", {"x": 1})
    assert re.fullmatch("[a-z0-9]{9}", call.call_id), "an id that Mistral's templates accept"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 4
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"


def test_reasoning_text_and_calls_are_streamed(thinker: openai.OpenAI) -> None:
    events = list(thinker.responses.create(model="demo", input="Q", tools=TOOLS, stream=True))
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call"]
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "Well"
    (done,) = (e for e in events if e.type == "response.function_call_arguments.done")
    assert (done.name, json.loads(done.arguments)) == ("f", {"x": 1})
    last = events[-1]
    assert last.type == "response.completed"
    whole = [item.id for item in last.response.output]
    ended = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert ended == whole
    with thinker.responses.stream(model="demo", input="Q", tools=TOOLS) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == added


def test_the_output_may_be_part_of_the_next_input(
    thinker: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    first = thinker.responses.create(model="demo", input="Q", tools=TOOLS)
    call = first.output[-1]
    assert call.type == "function_call"
    items: Any = [{"role": "user", "content": "Q"}, *first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "R"})
    thinker.responses.create(model="demo", input=items, tools=TOOLS, instructions="Be.")
    assert prompt(engine, tokenizer) == "f;s:Be.;u:Q;a:So:;t:R;a:"


def test_items(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [
            {"type": "input_text", "text": "R"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "N"}]},
    ]  # fmt: skip
    assert http.post("/v1/responses", json={"input": items, "instructions": "I"}).status_code == 200
    assert prompt(engine, tokenizer) == "s:I\n\nD;u:A\nB;a:;t:R;a:N;a:"


class Answer(pydantic.BaseModel):
    a: int


def test_structured_output(demo: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """The client's `parse` sends a pydantic model's schema; `create` sends a format."""
    engine.script = says([*tokenizer.encode('{"a": 1}'), EOS])
    parsed = demo.responses.parse(model="demo", input="Q", text_format=Answer)
    assert parsed.output_parsed == Answer(a=1)
    (constraint,) = json.loads(grammar(engine))["grammars"]
    assert constraint["json_schema"]["properties"]["a"]["type"] == "integer"
    demo.responses.create(model="demo", input="Q", text={"format": {"type": "json_object"}})
    assert submitted(engine).params.structured_outputs is not None
    demo.responses.create(model="demo", input="Q", text={"format": {"type": "text"}})
    assert submitted(engine).params.structured_outputs is None


def test_tool_choices(serve: Serve, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    tools = [*TOOLS, {"type": "function", "name": "g", "strict": True}]
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}
    with openai_client(serve(tool_call_parser="hermes")) as client:

        def ask(choice: Any) -> bool:
            client.responses.create(model="demo", input="Q", tools=tools, tool_choice=choice)
            return submitted(engine).params.structured_outputs is not None

        assert not ask("auto")
        assert prompt(engine, tokenizer) == "f;g;u:Q;a:"
        assert ask("required")
        assert ask({"type": "function", "name": "f"})
        assert '\\"g\\"' not in grammar(engine)
        assert not ask({**allowed, "mode": "auto"})
        assert prompt(engine, tokenizer) == "g;u:Q;a:"
        assert ask({**allowed, "mode": "required"})
        assert not ask("none")
        assert prompt(engine, tokenizer) == "u:Q;a:"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "a string or a list"),
    ({"input": []}, "input", "at least one item"),
    ({"input": [{"content": "x"}]}, "input[0].role", "a string"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "one of user"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
     "input[0].content[0].type", "input_file is not supported"),
    ({"input": [{"role": "developer", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type", "only messages of the user and results of tools"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]", "a part such as"),
    ({"input": [{"role": "user"}]}, "input[0].content", "list of parts"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "nothing is stored"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type", "not supported"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]},
     "input[0].arguments", "JSON object"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "a string"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
    ({"conversation": "c"}, "conversation", "nothing is stored"),
    ({"prompt": {"id": "p"}}, "prompt", "nothing is stored"),
    ({"background": True}, "background", "not supported"),
    ({"truncation": "auto"}, "truncation", "truncate_prompt_tokens"),
    ({"top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search is not supported"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "a string"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters", ""),
    ({"tools": TOOLS}, "tools", "option.tool_call_parser"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "expected none"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}},
     "tool_choice.function.name", "no function 'g'"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
    ({"text": {"formats": {}}}, "text.formats", "no such field"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format", "combined"),
    ({"text": {"format": {"type": "json_object"}}, "tools": TOOLS, "tool_choice": "required"},
     "tool_choice", "combined"),
    ({"reasoning": {"effort": "very"}}, "reasoning.effort", "one of none"),
    ({"max_output_tokens": 99}, "max_output_tokens", "maximum context length"),
    ({"temperature": -1}, "temperature", "0 to 1e30"),
    ({"request_id": "a b"}, "request_id", "ASCII"),
    ({"n": 2}, "n", "no such field"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_invalid_requests(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    response = http.post("/v1/responses", json={"input": "Q", **fields})
    assert response.status_code == 400
    error = response.get_json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in error["message"]
    assert not engine.of_type(Submit)


LOGPROBS: Any = ["message.output_text.logprobs"]


def scored(logprobs: Any) -> list[tuple[str, float]]:
    return [(entry.token, entry.logprob) for entry in logprobs]


def test_logprobs(demo: openai.OpenAI, engine: FakeEngine) -> None:
    """The end token is not text, so it has no logprob."""
    asked: Any = {"model": "demo", "input": "Q", "include": LOGPROBS, "top_logprobs": 2}
    expected = [(letter, -0.5) for letter in "Hi there"]
    response = demo.responses.create(**asked)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert scored(part.logprobs) == expected
    assert part.logprobs is not None
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 8
    assert part.logprobs[0].bytes == [ord("H")]
    assert response.top_logprobs == 2
    assert submitted(engine).params.logprobs == 2
    events = list(demo.responses.create(**asked, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [pair for event in deltas for pair in scored(event.logprobs)] == expected
    assert all(scored(event.logprobs) == [(event.delta, -0.5)] for event in deltas), (
        "each delta has the logprob of its own text"
    )
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert scored(done.logprobs) == expected
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[0].to_dict() == {**message.to_dict(), "id": done.item_id}


def test_logprobs_are_of_the_text_alone(thinker: openai.OpenAI) -> None:
    """The tokens of reasoning, tags and calls are left out."""
    asked: Any = {"model": "demo", "input": "Q", "include": LOGPROBS, "tools": TOOLS}
    _, message, _ = thinker.responses.create(**asked).output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs).strip() == part.text == "So:"
    events = list(thinker.responses.create(**asked, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [pair for event in deltas for pair in scored(event.logprobs)]
    assert streamed == scored(part.logprobs)


def test_without_include_there_are_no_logprobs(http: FlaskClient) -> None:
    response = http.post("/v1/responses", json={"input": "Q", "top_logprobs": 2})
    (message,) = response.get_json()["output"]
    assert message["content"][0]["logprobs"] == []
    assert "top_logprobs has no effect without" in response.headers["X-Longshore-Warning"]


def test_fields_without_effect_are_named(http: FlaskClient, engine: FakeEngine) -> None:
    fields = {
        "store": True, "include": ["reasoning.encrypted_content"], "user": "me", "stop": "x",
        "text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}, "cache_salt": "tenant",
    }  # fmt: skip
    response = http.post("/v1/responses", json={"input": "Q", **fields})
    warnings = response.headers["X-Longshore-Warning"]
    for name in ("store", "include", "user", "text.verbosity", "reasoning.summary"):
        assert name in warnings
    assert "cache_salt" not in warnings
    assert submitted(engine).params.cache_salt == "tenant"
    assert response.get_json()["store"] is False
    without = http.post("/v1/responses", json={"input": "Q", "store": False})
    assert "X-Longshore-Warning" not in without.headers


def test_a_limit_to_one_call_gives_a_warning_unless_a_call_is_forced(serve: Serve) -> None:
    http = serve(tool_call_parser="hermes")
    body = {"input": "Q", "tools": TOOLS, "parallel_tool_calls": False}
    warned = http.post("/v1/responses", json=body)
    assert warned.headers["X-Longshore-Warning"] == (
        "parallel_tool_calls has no effect with this tool_choice"
    )
    forced = http.post("/v1/responses", json={**body, "tool_choice": "required"})
    assert "X-Longshore-Warning" not in forced.headers


@pytest.mark.parametrize("name", ["a\nb", "é", "中", "x" * 10000])
def test_a_warning_does_not_repeat_what_the_client_wrote(http: FlaskClient, name: str) -> None:
    response = http.post("/v1/responses", json={"input": "Q", "include": [name, name]})
    assert response.status_code == 200
    assert response.headers["X-Longshore-Warning"] == (
        "include has no effect here, except message.output_text.logprobs"
    )


def test_failures(demo: openai.OpenAI, http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = fails("overloaded", "full")
    with pytest.raises(openai.InternalServerError, match="full"):
        demo.responses.create(model="demo", input="Q")
    with pytest.raises(openai.InternalServerError, match="full"):
        demo.responses.create(model="demo", input="Q", stream=True)
    engine.script = fails("failed", "no luck", after=[65])
    last = list(demo.responses.create(model="demo", input="Q", stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "no luck"


def test_responses_through_sagemakers_route(serve: Serve) -> None:
    with closing(sagemaker_runtime(serve(local_runtime_api=True))) as client:
        answer = client.invoke_endpoint(
            EndpointName="any", ContentType="application/json", Body=json.dumps({"input": "Q"}),
            CustomAttributes="route=/v1/responses",
        )  # fmt: skip
        assert json.load(answer["Body"])["object"] == "response"
