"""Response templates: the messages are those of transformers' parser, however the text is split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from core.errors import ConfigurationError
from core.text.reasoning.base import Reasoning
from core.text.tools.base import ToolCall
from core.text.tools.response_template import content
from core.text.tools.response_template.parser import Part, ResponseParser
from core.text.tools.response_template.template import read_template

BOS = "<|im_start|>assistant\n"
WHOLE = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
JSON_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": BOS,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>",
                       "repeats": True, "content": "json", "transform": WHOLE},
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|eot\|>)"},
    },
}  # fmt: skip
XML_CALLS: dict[str, Any] = {
    "start_anchor_pattern": r"<\|im_start\|>(assistant|tool)\n",
    "fields": {
        "thinking": {"open": ["<think>", "<think>\n"], "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>", "repeats": True,
            "content": "xml-inline", "transform": NAMED,
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "merge_duplicates": True,
            },
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}  # fmt: skip
ODD_JSON: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>",
                              "repeats": True, "join": "\n"},
        "tool_calls": {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>",
                       "repeats": True, "content": "json", "transform": NAMED,
                       "content_args": {"unquoted_keys": True,
                                        "string_delims": [['<|"|>', '<|"|>']]}},
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}  # fmt: skip
LISTED: dict[str, Any] = {
    "start_anchor": BOS,
    "fields": {
        "tool_calls": {"open": "<calls>", "close": "</calls>", "content": "json",
                       "transform": {"function": {"name": "{tool}", "arguments": "{input}"}},
                       "transform_each": True},
        "score": {"open": "<score>", "close": "</score>", "content": "float"},
        "content": {"content_args": {"strip": False}},
    },
}  # fmt: skip
LINES: dict[str, Any] = {
    "start_anchor": BOS,
    "fields": {
        "tool_calls": {"open_pattern": r"CALL (?P<name>\w+)\n", "close": "\nEND", "repeats": True,
                       "content": "kv-lines", "transform": NAMED,
                       "content_args": {"kv_sep": "=", "value_parser": {
                           "name": "json", "args": {"allow_non_json": True}}}},
        "content": {"open": "<say>", "close": "</say>"},
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {
    "n": {"type": "integer"}, "s": {"type": "string"}, "b": {"type": ["boolean", "null"]},
    "x": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "o": {"type": "object"},
    "l": {"type": "array"},
}}}}]  # fmt: skip
XML = (
    "<tool_call>\n<function=f>\n<parameter=n>\n7.0\n</parameter>\n<parameter=s>\n7\n</parameter>"
    "<parameter=b>True</parameter><parameter=x>None</parameter><parameter=o>{\"a\": [1]}"
    "</parameter><parameter=l>[1</parameter><parameter=z>1</parameter><parameter=z>2</parameter>"
    "</function>\n</tool_call>"
)  # fmt: skip
CALL = '<tool_call>{"name": "f", "arguments": {"n": 1, "s": "é<"}}</tool_call>'
CASES: list[tuple[dict[str, Any], str, str]] = [
    (JSON_CALLS, BOS, "Hello <b>\n there <|im_end|>\n<|im_end|>"),
    (JSON_CALLS, f"x{BOS}y{BOS}<think>\n", f"let me\n</think>\n\n{CALL}\n{CALL}<|im_end|>"),
    (JSON_CALLS, f"{BOS}<think>\n\n</think>\n\n", "no reasons <think"),
    (JSON_CALLS, BOS, f"<think>a</think>So:\n{CALL}<|eot|>"),
    (JSON_CALLS, BOS, CALL.removesuffix("</tool_call>")),
    (JSON_CALLS, BOS, "<think>cut off"),
    (XML_CALLS, BOS, f"<think>\nhm\n</think>\nOK.\n\n{XML}\n{XML}<|im_end|>"),
    (ODD_JSON, "<|turn>model\n",
     "<|channel>thought\na<channel|><|channel>thought\nb<channel|>"
     '<|tool_call>call:f{n:1,s:<|"|>say "x": {y:1}<|"|>,o:{a:true}}<tool_call|><turn|>'),
    (ODD_JSON, "<|turn>model\n", "Paris.<eos>"),
    (LISTED, BOS, '  text  <score> 0.5 </score><calls>[{"tool": "f", "input": {"n": 2}},'
     ' {"tool": "g", "input": {}}]</calls>'),
    (LINES, BOS, "dropped<say> Hi </say>CALL f\nn = 3\ns = 4\n\nEND and dropped"),
]  # fmt: skip


def parts_of(spec: dict[str, Any], prompt: str, texts: list[str], tools: Any = TOOLS) -> list[Part]:
    parser = ResponseParser(read_template(spec), prompt, tools)
    return [part for text in texts for part in parser.push(text)] + parser.flush()


def message(parts: list[Part]) -> dict[str, Any]:
    calls = [(p.name, json.loads(p.arguments)) for p in parts if isinstance(p, ToolCall)]
    return {
        "content": "".join(part for part in parts if isinstance(part, str)),
        "reasoning": "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "calls": calls,
    }


def as_transformers(spec: dict[str, Any], prompt: str, text: str) -> dict[str, Any]:
    parsed = parse_response(text, spec, prefix=prompt, tools=[*TOOLS])
    calls = [call["function"] for call in parsed.get("tool_calls", [])]
    return {
        "content": parsed.get("content", ""),
        "reasoning": parsed.get("reasoning_content", parsed.get("thinking", "")),
        "calls": [(call["name"], call["arguments"]) for call in calls],
    }


@pytest.mark.parametrize(("spec", "prompt", "text"), CASES)
def test_answers_are_parsed_as_by_transformers(spec: Any, prompt: str, text: str) -> None:
    expected = as_transformers(spec, prompt, text)
    assert message(parts_of(spec, prompt, [text])) == expected
    assert message(parts_of(spec, prompt, list(text))) == expected


def test_no_content_is_lost_where_transformers_loses_it() -> None:
    """There, each part of the content replaces the part before, and the prompt may be content."""
    assert message(parts_of(JSON_CALLS, BOS, [f"So: {CALL} That is it."]))["content"] == (
        "So: That is it."
    )
    assert message(parts_of(JSON_CALLS, "no anchor", ["Hi"]))["content"] == "Hi"


@given(st.lists(st.sampled_from([
    "<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", '"', " ", "\n", "f", CALL,
]), max_size=9))  # fmt: skip
def test_splitting_a_text_changes_nothing(texts: list[str]) -> None:
    whole = message(parts_of(JSON_CALLS, BOS, ["".join(texts)]))
    assert message(parts_of(JSON_CALLS, BOS, texts)) == whole
    assert message(parts_of(JSON_CALLS, BOS, list("".join(texts)))) == whole


def test_text_is_released_as_soon_as_it_is_certain() -> None:
    parser = ResponseParser(read_template(JSON_CALLS), f"{BOS}<think>", TOOLS)
    assert parser.is_inside
    assert parser.push("let me ") == [Reasoning("let me")]
    assert parser.push("see</thi") == [Reasoning(" see")]
    assert parser.push("nk>") == []
    assert not parser.is_inside
    assert parser.push(" So <") == ["So"]
    assert parser.push("tool_call>") == []
    assert parser.push('{"name": "g", "arguments": {}}</tool_call>') == [ToolCall("g", "{}")]
    assert parser.push(" and") == [" and"]
    assert parser.flush() == []


def test_what_is_no_call_stays_text() -> None:
    broken = "a <tool_call>{no json</tool_call> b"
    assert message(parts_of(JSON_CALLS, BOS, [broken]))["content"] == broken
    assert message(parts_of(JSON_CALLS, BOS, [f"a {CALL}"], None))["content"] == f"a {CALL}"


def test_a_pattern_that_takes_too_long_ends_only_the_parsing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pattern with nested repetitions takes exponential time."""
    monkeypatch.setattr(content, "TIMEOUT_S", 0.01)
    slow = {"open": "<c>", "close": "</c>", "content": "xml-inline", "transform": NAMED,
            "content_args": {"tag_pattern": r"(?P<key>(?:a|aa|a.)+)=(?P<value>b)c"}}  # fmt: skip
    text = f"<c>{'a' * 60}</c>"
    spec = {"start_anchor": BOS, "fields": {"tool_calls": slow, "content": {}}}
    assert message(parts_of(spec, BOS, [text]))["content"] == text
    marks = {"content": {"close_pattern": r"(?:a|aa|a.)+=bc"}}
    text = f"{'a' * 60} end"
    assert message(parts_of({"start_anchor": BOS, "fields": marks}, BOS, [text]))["content"] == text


def test_marks_without_characters_end() -> None:
    fields = {"tool_calls": {"open_pattern": "(?=<)", "close_pattern": "(?=<)"}, "content": {}}
    spec = {"start_anchor": BOS, "fields": fields}
    assert message(parts_of(spec, BOS, ["a<b"]))["content"] == "a<b"


def test_special_tokens_are_found_in_patterns() -> None:
    tokens = read_template(ODD_JSON).special_tokens
    assert {"<|tool_call>", "<tool_call|>", "<channel|>", '<|"|>', "<eos>"} <= set(tokens)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ([], "Expected `object`, got `array`"),
        ({"fields": {"content": {"opens": "x"}}}, "unknown field `opens`"),
        ({"version": 2, "fields": {"content": {}}}, "Invalid enum value 2"),
        ({"fields": {"content": {}, "thinking": {}}}, "2 of 2 fields have no opening mark"),
        ({"fields": {"content": {"open": "a", "open_pattern": "a"}}}, "not both"),
        ({"fields": {"content": {"open_pattern": "("}}}, "missing \\)"),
        ({"fields": {"content": {"open": ""}}}, "must not be empty"),
        ({"fields": {"content": {"join": ","}}}, "join needs repeats"),
        ({"fields": {"content": {"transform": "a {content}"}}}, "mixes a placeholder"),
        ({"fields": {"tool_calls": {"open": "a", "content": "xml-inline"}}}, "needs the groups"),
    ],
)
def test_templates_that_cannot_be_used(spec: object, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"response_template: .*{reason}.*; correct or"):
        read_template(spec)
