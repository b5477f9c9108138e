"""Answers of a model whose tokenizer has a response template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from container.front_end.app import create_app
from container.isolation.helper import Helper
from container.wire.engine_client import EngineClient
from core.configuration.options import make_options
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer
from core.text.tools.response_template.template import read_template
from tests.container.apis.test_chat import TOOLS, ask, events
from tests.container.conftest import EOS, Serve
from tests.container.fake_engine import FakeEngine, says

SPEC: dict[str, Any] = {
    "start_anchor": "a:",
    "fields": {
        "thinking": {"open": "<why>", "close": "</why>"},
        "tool_calls": {"open": "[CALL]", "close": "!", "content": "json", "repeats": True,
                       "transform": {"function": "{content}"}},
        "content": {"close": "<eos>"},
    },
}  # fmt: skip
"""<eos> is a special token, which the parser sees."""
CALL = '[CALL]{"name": "f", "arguments": {"x": 1}}!'
ANSWER = f"<why>\nhm\n</why>\nSo: {CALL}"
Open = Callable[..., FlaskClient]


@pytest.fixture
def open_app(
    client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate, helper: Helper
) -> Open:
    own = ChatTemplate(template.source.source, response=read_template(SPEC))

    def open_app(**options: Any) -> FlaskClient:
        app = create_app(client, tokenizer, make_options(options), "demo", own, helper=helper)
        return app.test_client()

    return open_app


@pytest.mark.parametrize("per_step", [1, 100])
def test_the_template_finds_reasoning_and_calls(
    open_app: Open, engine: FakeEngine, tokenizer: Tokenizer, per_step: int
) -> None:
    engine.script = says([*tokenizer.encode(ANSWER), EOS], per_step=per_step)
    http = open_app()
    body = ask(http, tools=TOOLS).get_json()
    choice = body["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("So:", "hm")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
    deltas = [event["choices"][0]["delta"] for event in events(ask(http, tools=TOOLS, stream=True))]
    assert "".join(delta.get("content") or "" for delta in deltas) == "So:"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    ((call,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert call["function"] == message["tool_calls"][0]["function"]


def test_calls_stay_text_if_the_request_has_no_tools(
    open_app: Open, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = says([*tokenizer.encode(ANSWER), EOS])
    message = ask(open_app()).get_json()["choices"][0]["message"]
    assert message["content"] == f"So:{CALL}"


def test_options_that_name_formats_count_more(
    open_app: Open, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = says([*tokenizer.encode("<why>a</why>b"), EOS])
    for options in ({"tool_call_parser": "hermes"}, {"reasoning_parser": "none"}):
        message = ask(open_app(**options)).get_json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "<why>a</why>b"}


def test_forced_calls_and_structured_outputs_have_formats_of_their_own(
    open_app: Open, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    http = open_app()
    engine.script = says([*tokenizer.encode('{"name": "f", "parameters": {}}'), EOS])
    message = ask(http, tools=TOOLS, tool_choice="required").get_json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "f"
    engine.script = says([*tokenizer.encode("<why>"), EOS])
    fields = {"tools": TOOLS, "guided_regex": ".*"}
    assert ask(http, **fields).get_json()["choices"][0]["message"]["content"] == "<why>"


@pytest.mark.parametrize(
    ("path", "find"),
    [
        ("/v1/chat/completions", lambda body: body["choices"][0]["message"]["tool_calls"][0]["id"]),
        ("/v1/messages", lambda body: body["content"][0]["id"]),
        ("/v1/responses", lambda body: body["output"][0]["call_id"]),
    ],
)
def test_ids_that_the_model_writes_are_the_calls_ids(
    serve: Serve, engine: FakeEngine, tokenizer: Tokenizer, path: str, find: Callable[[Any], str]
) -> None:
    """Kimi K2 writes ids, which its chat template shows it again."""
    call = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    engine.script = says([*tokenizer.encode(call), EOS])
    tools: list[dict[str, Any]] = {
        "/v1/messages": [{"name": "f", "input_schema": {"type": "object"}}],
        "/v1/responses": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    }.get(path, TOOLS)
    body = {"messages": [{"role": "user", "content": "Q"}], "input": "Q"}
    body.pop("messages" if path.endswith("responses") else "input")
    tokens = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    answer = serve(tool_call_parser="kimi_k2").post(path, json={**body, "tools": tools, tokens: 90})
    assert find(answer.get_json()) == "functions.f:3"
