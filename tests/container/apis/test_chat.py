"""Chat completions with a fake engine: prompts, responses, tool calls and rejected requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from container.apis.generation.rendering import ISOLATED_BYTES
from container.front_end.app import create_app
from container.wire.engine_client import EngineClient
from core.configuration.options import Options
from core.protocol.messages import Submit
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS, Serve
from tests.container.fake_engine import FakeEngine, fails, says

USER = {"role": "user", "content": "Q"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def ask(
    http: FlaskClient, *messages: object, path: str = "/v1/chat/completions", **fields: Any
) -> TestResponse:
    return http.post(path, json={"messages": messages or [USER], **fields})


def events(response: TestResponse) -> list[dict[str, Any]]:
    """Return the records of server-sent events, which end with [DONE]."""
    data = response.get_data(as_text=True)
    assert data.endswith("data: [DONE]\n\n")
    assert response.mimetype == "text/event-stream"
    return [json.loads(line.removeprefix("data: ")) for line in data.split("\n\n")[:-2]]


def submitted(engine: FakeEngine) -> Submit:
    submit = engine.of_type(Submit)[-1]
    assert isinstance(submit, Submit)
    return submit


def prompt(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(submitted(engine).prompt_token_ids)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/predictions/demo"])
def test_chat_completion(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer, path: str
) -> None:
    body = ask(http, path=path).get_json()
    assert body["object"] == "chat.completion"
    assert (body["model"], body["id"][:9]) == ("demo", "chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 9, "total_tokens": 15}
    assert prompt(engine, tokenizer) == "u:Q;a:"


def test_by_default_an_answer_may_fill_the_context(http: FlaskClient, engine: FakeEngine) -> None:
    ask(http)
    assert submitted(engine).params.max_tokens == 94
    assert submitted(engine).params.temperature == 1.0
    ask(http, max_completion_tokens=2, temperature=0, seed=3, top_k=4)
    params = submitted(engine).params
    assert (params.max_tokens, params.temperature, params.seed, params.top_k) == (2, 0, 3, 4)


def test_chat_stream(http: FlaskClient) -> None:
    chunks = events(ask(http, stream=True, max_tokens=2))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_chat_stream_with_usage(http: FlaskClient) -> None:
    *chunks, last = events(ask(http, stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 6, "completion_tokens": 9, "total_tokens": 15}


def test_invocations_streams_have_the_requested_format(http: FlaskClient, serve: Serve) -> None:
    lines = ask(http, path="/invocations", stream=True)
    assert lines.mimetype == "application/jsonlines"
    assert json.loads(lines.get_data().splitlines()[-1])["choices"][0]["finish_reason"] == "stop"
    sse = serve(output_formatter="sse")
    assert events(ask(sse, path="/invocations", stream=True))


def test_logprobs(http: FlaskClient) -> None:
    choice = ask(http, logprobs=True, top_logprobs=0, max_tokens=2).get_json()["choices"][0]
    expected = [
        {"token": letter, "logprob": -0.5, "bytes": [ord(letter)], "top_logprobs": []}
        for letter in "Hi"
    ]
    assert choice["logprobs"] == {"content": expected}
    chunks = events(ask(http, logprobs=True, top_logprobs=0, max_tokens=2, stream=True))
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for item in logprobs if item for entry in item["content"]] == expected


def test_by_default_logprobs_include_the_likeliest_token(http: FlaskClient) -> None:
    """LMI has the same default. Beam search returns logprobs, but no top_logprobs."""
    (entry,) = ask(http, logprobs=True, max_tokens=1).get_json()["choices"][0]["logprobs"][
        "content"
    ]
    assert len(entry["top_logprobs"]) == 1
    beams = {"num_beams": 2, "temperature": 0, "max_tokens": 1}
    (entry,) = ask(http, logprobs=True, **beams).get_json()["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []


@pytest.mark.parametrize("per_step", [1, 7, 100])
def test_tool_calls(serve: Serve, engine: FakeEngine, tokenizer: Tokenizer, per_step: int) -> None:
    http = serve(tool_call_parser="hermes")
    engine.script = says([*tokenizer.encode(f"So: {CALL}"), EOS], per_step=per_step)
    choice = ask(http, tools=TOOLS).get_json()["choices"][0]
    assert prompt(engine, tokenizer) == "f;u:Q;a:"
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("So:", "tool_calls")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert (call["type"], len(call["id"])) == ("function", 9)

    chunks = events(ask(http, tools=TOOLS, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "So:"
    ((streamed,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (streamed["index"], streamed["function"]) == (0, call["function"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_without_text(serve: Serve, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.script = says([*tokenizer.encode(CALL), EOS])
    choice = ask(serve(tool_call_parser="hermes"), tools=TOOLS).get_json()["choices"][0]
    assert choice["message"]["content"] is None


def test_tools_are_omitted_if_tool_choice_is_none(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = says([*tokenizer.encode(CALL), EOS])
    message = ask(http, tools=TOOLS, tool_choice="none").get_json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALL}
    assert prompt(engine, tokenizer) == "u:Q;a:"


def test_tool_calls_may_use_special_tokens(
    serve: Serve, engine: FakeEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral's [TOOL_CALLS] is a special token. Here <eos> takes its place."""
    monkeypatch.setattr("core.text.tools.mistral.MistralParser.mark", "<eos>")
    monkeypatch.setattr("core.text.tools.mistral.MistralParser.special_tokens", ("<eos>",))
    engine.script = says([*tokenizer.encode("<eos>f{}")])
    choice = ask(serve(tool_call_parser="mistral"), tools=TOOLS).get_json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_past_tool_calls_are_rendered_for_the_model(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "R"}]}
    assert ask(http, USER, called, result).status_code == 200
    assert prompt(engine, tokenizer) == "u:Q;a:;t:R;a:"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_missing_content_of_a_past_call_is_rendered_as_empty(
    client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer, content: dict[str, str | None]
) -> None:
    """The demo model's template, like this one, appends content to role, and fails on null."""
    template = ChatTemplate(
        "{% for message in messages %}{{ message.role[0] + message.content }}{% endfor %}"
    )
    http = create_app(client, tokenizer, Options(), "demo", template).test_client()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "tool_calls": [call], **content}
    result = {"role": "tool", "tool_call_id": "1", "content": "R"}
    assert ask(http, USER, called, result).status_code == 200
    assert prompt(engine, tokenizer) == "uQatR"


def test_continuing_the_last_message(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    begun = {"role": "assistant", "content": "Well, "}
    ask(http, USER, begun, continue_final_message=True)
    assert prompt(engine, tokenizer) == "u:Q;a:Well, "
    ask(http, USER, add_generation_prompt=False)
    assert prompt(engine, tokenizer) == "u:Q;"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "list of objects"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "a string"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "a string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0].image_url.url", "expected a PNG, JPEG or WebP image"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
     "messages[0].content[0].type", "input_audio is not supported; only text and image_url are"),
    ({"messages": [{"role": "system", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type", "only messages of the user and results of tools"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "a part"),
    ({"messages": [{"role": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", ""),
    ({"messages": [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments", "JSON object"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "no robots"),
    ({"tools": TOOLS}, "tools", "option.tool_call_parser"),
    ({"n": 0}, "n", "1 to 128"),
    ({"n": 3, "best_of": 2}, "best_of", "n to 128"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "0 to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "combined with stream"),
    ({"num_beams": 2, "top_p": 0.5}, "top_p", "beam search"),
    ({"early_stopping": "soon"}, "early_stopping", 'or "never"'),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size", "0 to 2147483647"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"": 1}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"-5": 1}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"05": 1}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"5.0": 1}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"9" * 20: 1}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"5": True}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"5": None}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"5": 2**70}}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": {"5": 1e7}}, "logit_bias", "-1e6 to 1e6"),
    ({"logit_bias": [1]}, "logit_bias", "token ids to numbers"),
    ({"logit_bias": 1}, "logit_bias", "token ids to numbers"),
    ({"max_token": 5}, "max_token", "did you mean 'max_tokens'"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "twice"),
    ({"max_tokens": 95}, "max_tokens", "95 is more than the 94"),
    ({"temperature": -1}, "temperature", "0 to 1e30"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ""),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages", "no room"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "does not fit"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_invalid_requests(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    response = http.post("/v1/chat/completions", json={"messages": [USER], **fields})
    assert response.status_code == 400
    error = response.get_json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", 400)
    assert message in error["message"]
    assert not engine.of_type(Submit)
    same = http.post("/invocations", json={"messages": [USER], **fields})
    assert (same.status_code, same.get_json()["field"]) == (400, param)


def test_parameters_without_effect_are_accepted(http: FlaskClient) -> None:
    fields = {
        "model": "gpt-5", "user": "me", "metadata": {}, "store": False, "n": 1, "logit_bias": {},
        "presence_penalty": 0.0, "frequency_penalty": 0, "top_logprobs": 0, "tool_choice": "auto",
        "response_format": {"type": "text"}, "stop": None, "parallel_tool_calls": True,
    }  # fmt: skip
    assert ask(http, **fields).status_code == 200


def test_a_model_without_a_template(client: EngineClient, tokenizer: Tokenizer) -> None:
    http = create_app(client, tokenizer, Options(), "demo").test_client()
    error = ask(http).get_json()["error"]
    assert (error["param"], "option.chat_template" in error["message"]) == ("messages", True)


def test_errors_have_openais_format(http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = fails("overloaded", "full")
    for streamed in (False, True):
        response = ask(http, stream=streamed)
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        error = {"message": "full", "type": "server_error", "param": None, "code": 503}
        assert response.get_json() == {"error": error}
    engine.script = fails("failed", "no luck", after=[65])
    last = events(ask(http, stream=True))[-1]
    assert (last["error"]["message"], last["error"]["code"]) == ("no luck", 424)
    wrong_type = http.post("/v1/chat/completions", data="x", content_type="text/plain")
    assert (wrong_type.status_code, wrong_type.get_json()["error"]["code"]) == (415, 415)


LARGE = 10**30
LONG = "x" * ISOLATED_BYTES
"""A conversation with this text is rendered in the helper process."""


@pytest.mark.parametrize("text", ["Q", LONG])
def test_variables_have_integers_of_at_most_64_bits(http: FlaskClient, text: str) -> None:
    message = {"role": "user", "content": text}
    response = ask(http, message, chat_template_kwargs={"a": {"b": [1, LARGE]}})
    error = response.get_json()["error"]
    assert (response.status_code, error["param"]) == (400, "chat_template_kwargs.a.b[1]")
    assert "64 bits" in error["message"]


@pytest.mark.parametrize("large", [LARGE, -LARGE, 2**64])
def test_large_integers_of_a_long_conversation_are_refused_by_name(
    serve: Serve, large: int
) -> None:
    """A short conversation may have them: the template renders them as text."""
    http = serve(tool_call_parser="hermes")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": large}}}
    calls = [{"id": "0", "type": "function",
              "function": {"name": "f", "arguments": json.dumps({"x": large})}}]  # fmt: skip
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    said = {"role": "user", "content": LONG}
    for messages, fields, place in (
        ((said,), {"tools": [tool]}, "tools[0].function.parameters.maximum"),
        ((said, answer), {}, "messages[1].tool_calls[0].function.arguments.x"),
    ):
        response = ask(http, *messages, **fields)
        assert (response.status_code, response.get_json()["error"]["param"]) == (400, place)
    assert ask(http, tools=[tool]).status_code == 200
    assert ask(http, said).get_json()["error"]["param"] == "messages", "the helper goes on"
