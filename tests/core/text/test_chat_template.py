"""Chat templates: where they are found, prompts equal to transformers', and rejected requests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from core.errors import ConfigurationError, RequestError
from core.text.chat_template import ChatTemplate
from core.text.template_files import load_chat_template
from tests.escaping import ESCAPING

DEMO = Path(__file__).parents[3] / "models" / "demo"
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
STRICT = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate') }}
    {% endif %}
[{{ message['role'] }}] {{ message['content'].strip() }} {{ eos_token }}
{% endfor %}"""
WITH_TOOLS = """{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }};
{% endfor %}{% endif %}{% for message in messages %}{% if loop.index > 3 %}{% break %}{% endif %}
{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{% endfor %}"""
PARTS = """{% for message in messages %}{% for part in message.content %}
{% if part.type == 'text' %}{{ part.text }}|{% endif %}{% endfor %}{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "strict": STRICT, "with tools": WITH_TOOLS, "parts": PARTS}

TALK = [
    {"role": "user", "content": "Wer <b>da</b> & dort? \u00e9 "},
    {"role": "assistant", "content": " Nay, answer me."},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": "<\u00e9>"}}}


def parts(messages: list[dict[str, str]]) -> list[dict[str, object]]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "how",
    [{"add_generation_prompt": True}, {"continue_final_message": True}, {}],
    ids=["answer", "continue", "neither"],
)
def test_prompts_equal_those_of_transformers(name: str, how: dict[str, bool]) -> None:
    how = {"add_generation_prompt": False, **how}
    template = ChatTemplate(TEMPLATES[name], special_tokens={"bos_token": "<s>"})
    messages = parts(TALK) if name == "parts" else TALK
    (expected,), _ = render_jinja_template(
        [messages],
        tools=[TOOL],
        chat_template=TEMPLATES[name],
        bos_token="<s>",
        eos_token="",
        **how,
    )
    assert template.render(TALK, tools=[TOOL], variables={"eos_token": ""}, **how) == expected


def test_tool_calls_reach_the_template() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert 'f({"x": 1})' in ChatTemplate(WITH_TOOLS).render(messages)


def test_content_is_text_or_parts_as_the_template_expects() -> None:
    two = [{"role": "user", "content": [{"type": "text", "text": letter} for letter in "ab"]}]
    assert "a\nb" in ChatTemplate(CHATML).render(two)
    assert ChatTemplate(PARTS).render(two) == "a|b|"
    assert ChatTemplate(PARTS).render([{"role": "user", "content": "ab"}]) == "ab|"


def test_a_separate_tool_template_is_used_for_tools() -> None:
    template = ChatTemplate("plain", with_tools="tools")
    assert template.render(TALK) == "plain"
    assert template.render(TALK, tools=[TOOL]) == "tools"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (STRICT, "Roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_template_errors_are_request_errors(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        ChatTemplate(source).render([{"role": "assistant", "content": "x"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("kind", ESCAPING)
def test_a_template_cannot_end_the_process(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("why")

    template = ChatTemplate("{% if fail %}{{ fail() }}{% endif %}")
    with pytest.raises(RequestError, match=f"rejects them: {kind.__name__}: why"):
        template.render(TALK, variables={"fail": fail})


@pytest.mark.parametrize(
    ("message", "source"),
    [
        ({"role": "assistant", "tool_calls": []}, CHATML),
        ({"role": "assistant", "content": "x"}, "nothing of it"),
    ],
)
def test_messages_that_cannot_be_continued(message: dict[str, object], source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render([message], continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_only_variables_that_the_template_reads_are_passed_to_it() -> None:
    """Others could replace the functions of the environment."""
    template = ChatTemplate(
        "{% if mood is not defined %}{% set mood = 'calm' %}{% endif %}{{ mood }}"
        "{% for n in range(2) %}{{ n }}{% endfor %}{{ strftime_now('x') }}"
    )
    hostile = {"range": 1, "strftime_now": 2, "raise_exception": 3, "namespace": 4}
    assert template.render(TALK, variables=hostile) == "calm01x"
    assert template.render(TALK, variables={"mood": "bright", **hostile}) == "bright01x"
    with_tools = ChatTemplate("plain", with_tools="{{ mood }}")
    assert with_tools.render(TALK, tools=[TOOL], variables={"mood": "bright"}) == "bright"


def test_template_variables_do_not_replace_the_messages() -> None:
    assert (
        ChatTemplate("{{ messages | length }}{{ mood }}").render(
            TALK, variables={"messages": [], "mood": "!"}
        )
        == "2!"
    )


def test_the_demo_models_template() -> None:
    template = load_chat_template(DEMO, None)
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]) == "<|user|>\nHi\n<|assistant|>\n"


def write(folder: Path, config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_where_templates_are_found(tmp_path: Path) -> None:
    def prompt(override: str | None = None, tools: tuple[object, ...] = ()) -> str:
        template = load_chat_template(tmp_path, override)
        assert template is not None
        return template.render(TALK, tools=tools)  # pyright: ignore[reportArgumentType]

    assert load_chat_template(tmp_path, None) is None

    write(tmp_path, {"eos_token": {"content": "</s>"}, "chat_template": "in config{{ eos_token }}"})
    assert prompt() == "in config</s>"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    write(tmp_path, {"chat_template": named})
    assert (prompt(), prompt(tools=(TOOL,))) == ("one", "two")
    (tmp_path / "chat_template.jinja").write_text("in file{{ bos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    assert prompt() == "in file<s>"
    (tmp_path / "mine.jinja").write_text("mine")
    assert prompt("mine.jinja") == "mine"
    elsewhere = shutil.copytree(tmp_path, tmp_path / "elsewhere") / "mine.jinja"
    assert prompt(str(elsewhere), tools=(TOOL,)) == "mine"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("chat_template.jinja", "{% if %}", "chat template, line 1"),
        ("chat_template.jinja", None, "cannot read the chat template"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template"),
    ],
)
def test_unusable_template_files(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is None:
        (tmp_path / name).write_bytes(b"\xff")
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        load_chat_template(tmp_path, None)
    with pytest.raises(ConfigurationError, match=r"nowhere\.jinja|" + message):
        load_chat_template(tmp_path, "nowhere.jinja")


def test_the_tokenizers_response_template(tmp_path: Path) -> None:
    config = {"chat_template": "x", "response_template": {"fields": {"content": {}}}}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    template = load_chat_template(tmp_path, None)
    assert template is not None
    assert template.response is not None
    path.write_text(json.dumps(config | {"response_template": {"fields": {}}}))
    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json: response_template: "):
        load_chat_template(tmp_path, None)
