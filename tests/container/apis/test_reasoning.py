"""Chat answers keep the reasoning apart from the content, as OpenAI's client reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from flask.testing import FlaskClient

from container.front_end.app import create_app
from container.isolation.helper import Helper
from container.wire.engine_client import EngineClient
from core.configuration.options import Options, make_options
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer
from tests.container.apis import test_chat
from tests.container.apis.test_chat import CALL, ask, events, prompt
from tests.container.clients import openai_client
from tests.container.conftest import EOS, Serve
from tests.container.fake_engine import FakeEngine, says

USER: Any = test_chat.USER
TOOLS: Any = test_chat.TOOLS
TEXT = f"<think>\nWell, f.\n</think>\n\nSo: {CALL}"
THINKING = ChatTemplate(
    "{{ messages[-1].content }}<think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)
"""A template that begins the reasoning itself, and ends it if no reasoning is wanted."""


@pytest.fixture
def http(serve: Serve, engine: FakeEngine, tokenizer: Tokenizer) -> FlaskClient:
    engine.script = says([*tokenizer.encode(TEXT), EOS])
    return serve(tool_call_parser="hermes", reasoning_parser="qwen3")


def test_reasoning_content_and_calls_are_apart(http: FlaskClient) -> None:
    with openai_client(http) as client:
        answer = client.chat.completions.create(
            model="demo", messages=[USER], tools=TOOLS, reasoning_effort="low"
        )
    (choice,) = answer.choices
    extra = choice.message.model_extra
    assert extra == {"reasoning": "Well, f.", "reasoning_content": "Well, f."}
    assert (choice.message.content, choice.finish_reason) == ("So:", "tool_calls")
    assert [call.to_dict()["function"] for call in choice.message.tool_calls or []] == [
        {"name": "f", "arguments": '{"x":1}'}
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    # Each character is a token. It counts as reasoning if the answer is inside the reasoning after
    # it: from the end of <think> to the last character before the end of </think>.
    inside = ">\nWell, f.\n</think"
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(inside)


@pytest.mark.parametrize("per_step", [1, 5, 100])
def test_reasoning_is_streamed(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer, per_step: int
) -> None:
    engine.script = says([*tokenizer.encode(TEXT), EOS], per_step=per_step)
    reasoning, content, calls = "", "", []
    with openai_client(http) as client:
        stream = client.chat.completions.create(
            model="demo", messages=[USER], tools=TOOLS, stream=True
        )
        for chunk in stream:
            delta = chunk.choices[0].delta
            fields: dict[str, Any] = delta.model_extra or {}
            assert fields.get("reasoning") == fields.get("reasoning_content")
            reasoning += fields.get("reasoning", "")
            content += delta.content or ""
            calls += delta.tool_calls or []
            assert not (content and fields), "no reasoning after content"
    assert (reasoning, content) == ("Well, f.", "So:")
    assert [call.function.name for call in calls] == ["f"]


def test_reasoning_may_be_left_out(http: FlaskClient) -> None:
    whole = ask(http, tools=TOOLS, include_reasoning=False).get_json()["choices"][0]["message"]
    assert (whole["content"], whole.keys()) == ("So:", {"role", "content", "tool_calls"})
    chunks = events(ask(http, tools=TOOLS, include_reasoning=False, stream=True))
    named = {name for chunk in chunks for name in chunk["choices"][0]["delta"]}
    assert named == {"role", "content", "tool_calls"}


def test_an_answer_with_a_constraint_does_not_reason(
    client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer, helper: Helper
) -> None:
    """With guided_choice, the first token is content, even if the template began the reasoning."""
    engine.script = says([*tokenizer.encode("yes</think>"), EOS])
    http = create_app(client, tokenizer, Options(), "demo", THINKING, helper=helper).test_client()
    assert ask(http).get_json()["choices"][0]["message"]["reasoning"] == "yes"
    message = ask(http, guided_choice=["yes"]).get_json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes</think>"}


def test_the_end_of_the_prompt_decides_whether_the_answer_begins_with_reasoning(
    client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer, helper: Helper
) -> None:
    """The template opens the reasoning at the end of the prompt, and may close it there, too.

    Unless option.reasoning_parser is set, the tags in the template choose the parser.
    """
    engine.script = says([*tokenizer.encode("Well</think>Hi"), EOS])

    def message(app_options: Options, **fields: Any) -> dict[str, Any]:
        app = create_app(client, tokenizer, app_options, "demo", THINKING, helper=helper)
        return ask(app.test_client(), **fields).get_json()["choices"][0]["message"]

    thought = message(Options())
    assert (thought["reasoning_content"], thought["content"]) == ("Well", "Hi")
    raw = {"role": "assistant", "content": "Well</think>Hi"}
    assert message(Options(), chat_template_kwargs={"enable_thinking": False}) == raw
    assert prompt(engine, tokenizer).endswith("</think>")
    assert message(Options(), reasoning_effort="none") == raw
    assert prompt(engine, tokenizer).endswith("</think>")
    assert message(make_options({"reasoning_parser": "none"})) == raw


def test_only_reasoning(http: FlaskClient) -> None:
    message = ask(http, max_tokens=12).get_json()["choices"][0]["message"]
    assert message == {
        "role": "assistant", "content": None, "reasoning": "Well", "reasoning_content": "Well"
    }  # fmt: skip


def test_templates_see_the_effort_and_earlier_reasoning(
    client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer, helper: Helper
) -> None:
    template = ChatTemplate(
        "{{ reasoning_effort }};{% for each in messages %}"
        "{{ each.content }}{{ each.reasoning }}{{ each.reasoning_content }};{% endfor %}"
    )
    http = create_app(client, tokenizer, Options(), "demo", template, helper=helper).test_client()
    for name in ("reasoning", "reasoning_content"):
        ask(http, USER, {"role": "assistant", "content": "A", name: "R"}, reasoning_effort="high")
        assert prompt(engine, tokenizer) == "high;Q;ARR;"
    refused = ask(http, reasoning_effort="very").get_json()["error"]
    assert refused["param"] == "reasoning_effort"


def with_special_tokens(tokenizer: Tokenizer, tokens: list[str], path: Path) -> Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(tokenizer.model_dir / "tokenizer.json"))
    library.add_special_tokens(tokens)
    library.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def test_tags_that_are_special_tokens_are_seen(
    client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Mistral's tags are special tokens."""
    special = with_special_tokens(tokenizer, ["[THINK]", "[/THINK]"], tmp_path)
    options = make_options({"reasoning_parser": "mistral"})
    http = create_app(client, special, options, "demo", ChatTemplate("Q")).test_client()
    engine.script = says([*special.encode("[THINK]Well[/THINK]Hi"), EOS])
    message = ask(http).get_json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Well", "Hi")


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"]


def test_harmony(
    client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Both parsers of gpt-oss run, one after the other. The template chooses the first."""
    special = with_special_tokens(tokenizer, HARMONY, tmp_path)
    template = ChatTemplate("{# <|start|> <|channel|>analysis <|message|> #}Q")
    app = create_app(
        client, special, make_options({"tool_call_parser": "openai"}), "demo", template
    )
    http = app.test_client()
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    text = f"<|channel|>analysis<|message|>Well<|end|><|start|>assistant{call}"
    engine.script = says([*special.encode(text), EOS], per_step=3)
    (choice,) = ask(http, tools=TOOLS).get_json()["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("Well", None)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in events(ask(http, tools=TOOLS, stream=True))]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Well"
    assert not any(delta.get("content") for delta in deltas)
    assert sum("tool_calls" in delta for delta in deltas) == 1


def test_values_of_calls_in_xml_have_the_types_of_the_tools(
    serve: Serve, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    parameters = {"type": "object", "properties": {"s": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<tool_call><function=f><parameter=s>1</parameter></function></tool_call>"
    engine.script = says([*tokenizer.encode(text), EOS])
    http = serve(tool_call_parser="qwen3_coder")
    message = ask(http, tools=tools).get_json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"s":"1"}'
