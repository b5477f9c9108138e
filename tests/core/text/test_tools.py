"""Parsing tool calls from model output, however the text is split."""

from __future__ import annotations

import ast
import json
import typing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.configuration.options import ToolCallParser
from core.text.tools.base import Piece, ToolCall
from core.text.tools.factory import make_tool_parser

HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": "\u00e9</b>"}}\n</tool_call>'
F = ToolCall("f", '{"x":"\u00e9</b>"}')
G = ToolCall("g", "{}")
XML = (
    "<tool_call>\n<function=f>\n<parameter=s>\n1\n2\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    '<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{"a": [1]}\n</parameter>\n'
    "<parameter=t>\nit\n</parameter>\n</function>\n</tool_call>"
)
X = ToolCall("f", '{"s":"1\\n2","n":3,"b":true,"o":{"a":[1]},"t":"it"}')
BEGIN, END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>" + BEGIN
CALLS_END, SEP = "<\uff5ctool\u2581calls\u2581end\uff5c>", "<\uff5ctool\u2581sep\uff5c>"
CHANNEL = "<|channel|>commentary to=functions."
ARGUMENTS = '{"x": "\u00e9</b>"}'
KIMI = "<|tool_call_argument_begin|>"
GLM = (
    "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1\n2</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
MINIMAX = (
    '<invoke name="f">\n<parameter name="s">1\n2</parameter>\n<parameter name="n">3</parameter>\n'
    "</invoke>"
)
FULL = ToolCall("f", '{"s":"1\\n2","n":3}')
CASES: list[tuple[ToolCallParser, str, list[Piece]]] = [
    ("hermes", "just <tool text", ["just <tool text"]),
    ("hermes", HERMES, [F]),
    ("hermes", f"Let me see. \n{HERMES}\n{HERMES}\n", ["Let me see.", F, F]),
    ("hermes", f"{HERMES} and so on", [F, " and so on"]),
    ("hermes", HERMES.removesuffix("</tool_call>"), [F]),
    ("hermes", "<tool_call>{no json}</tool_call>!", ["<tool_call>{no json}</tool_call>!"]),
    ("hermes", '<tool_call>{"name": "f", "argu', ['<tool_call>{"name": "f", "argu']),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ['<tool_call>{"name": "f"}</tool_call>']),
    ("hermes", "<tool_call>" + "[" * 3000, ["<tool_call>" + "[" * 3000]),
    ("hermes", "text with a blank end \n", ["text with a blank end \n"]),
    ("llama3_json", '{"name": "f", "parameters": {"x": "\u00e9</b>"}}', [F]),
    ("llama3_json", '{"name": "g", "parameters": {}}; {"name": "g", "arguments": {}}\n', [G, G]),
    ("llama3_json", '<|python_tag|>{"name": "g", "parameters": {}}', [G]),
    ("llama3_json", "text {and} so on", ["text {and} so on"]),
    ("llama3_json", '{"a": "b"} is JSON', ['{"a": "b"} is JSON']),
    ("llama3_json", '{"name": "f", "param', ['{"name": "f", "param']),
    ("llama3_json", "{" * 3000 + "}", ["{" * 3000 + "}"]),
    ("mistral", '[TOOL_CALLS] [{"name": "g", "arguments": {}}]', [G]),
    ("mistral", 'So.[TOOL_CALLS][{"name": "g", "arguments": {}},'
     ' {"name": "g", "arguments": {}}]', ["So.", G, G]),
    ("mistral", "[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]g{}", [G, G]),
    ("mistral", "[TOOL_CALLS]g[CALL_ID]abc123[ARGS]{}", [G]),
    ("mistral", "[TOOL_CALLS][", ["[TOOL_CALLS]["]),
    ("mistral", "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    ("mistral", "plain [text]", ["plain [text]"]),
    ("qwen3_coder", f"So: {XML}\n{XML}", ["So:", X, X]),
    ("qwen3_coder", XML.replace("\n</parameter>", "").replace("\n</function>", ""), [X]),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", [G]),
    ("qwen3_coder", "<tool_call>f()</tool_call>", ["<tool_call>f()</tool_call>"]),
    ("qwen3_coder", "<tool_call><function=f>x</function></tool_call>",
     ["<tool_call><function=f>x</function></tool_call>"]),
    ("pythonic", '[f(x="\u00e9</b>"), g()]', [F, G]),
    ("llama4_pythonic", "<|python_start|>[g()]<|python_end|>", [G]),
    ("pythonic", ' [a.b(x=[1, {"y": None}], y=-1.5)]\n',
     [ToolCall("a.b", '{"x":[1,{"y":null}],"y":-1.5}')]),
    ("pythonic", "[1] says so", ["[1] says so"]),
    ("pythonic", "[g(1)]", ["[g(1)]"]),
    ("pythonic", "[g(x=open())]", ["[g(x=open())]"]),
    ("pythonic", "[g(**{})]", ["[g(**{})]"]),
    ("pythonic", "[g()] is it", [G, " is it"]),
    ("pythonic", "[g(x=" + "(" * 3000 + "]", ["[g(x=" + "(" * 3000 + "]"]),
    ("deepseek_v3", f"So.{CALLS}function{SEP}f\n```json\n{ARGUMENTS}\n```{END}\n{BEGIN}function"
     f"{SEP}g\n```json\n{{}}\n```{END}{CALLS_END}", ["So.", F, G]),
    ("deepseek_v31", f"{CALLS}f{SEP}{ARGUMENTS}{END}{BEGIN}g{SEP}{{}}{END}{CALLS_END}!",
     [F, G, "!"]),
    ("deepseek_v31", f"{CALLS}g{SEP}{{}}", [G]),
    ("deepseek_v31", f"{CALLS}g{SEP}[]{END}{CALLS_END}", [f"{CALLS}g{SEP}[]{END}{CALLS_END}"]),
    ("glm45", f"So.\n{GLM}\n{GLM}\n", ["So.", FULL, FULL]),
    ("glm45", "<tool_call>g\n</tool_call>", [G]),
    ("glm45", "<tool_call>", ["<tool_call>"]),
    ("minimax_m2", f"So.\n<minimax:tool_call>\n{MINIMAX}\n{MINIMAX}\n</minimax:tool_call>",
     ["So.", FULL, FULL]),
    ("minimax_m2", '<invoke name="g">\n</invoke>', [G]),
    ("kimi_k2", f"So. <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0{KIMI}{ARGUMENTS}"
     f"<|tool_call_end|><|tool_call_begin|>g{KIMI}{{}}<|tool_call_end|><|tool_calls_section_end|>",
     ["So.", replace(F, id="functions.f:0"), replace(G, id="g")]),
    ("kimi_k2", f"<|tool_call_begin|>functions.g:1{KIMI}{{}}", [replace(G, id="functions.g:1")]),
    ("kimi_k2", f"<|tool_call_begin|>g{KIMI}[]<|tool_call_end|>",
     [f"<|tool_call_begin|>g{KIMI}[]<|tool_call_end|>"]),
    ("ernie45", f"So.\n\n{HERMES}\n\n{HERMES}\n", ["So.", F, F]),
    ("ernie45", f"<response>\nSo.\n</response>\n{HERMES}\n", ["So.", F]),
    ("hunyuan_a13b", f'So.<tool_calls>[{{"name": "f", "arguments": {ARGUMENTS}}}, '
     '{"name": "g", "arguments": {}}]</tool_calls>', ["So.", F, G]),
    ("hunyuan_a13b", "<tool_calls>[{}]</tool_calls>", ["<tool_calls>[{}]</tool_calls>"]),
    ("openai", f"So.{CHANNEL}f <|constrain|>json<|message|>{ARGUMENTS}<|call|>", ["So.", F]),
    ("openai", f"{CHANNEL}g<|message|>{{}}", [G]),
    ("openai", f"{CHANNEL}g json<|message|>{{}} <|call|>{CHANNEL}g<|message|>{{}}", [G, G]),
    ("openai", f"{CHANNEL}g<|message|>x<|call|>", [f"{CHANNEL}g<|message|>x<|call|>"]),
    ("granite", '<|tool_call|>[{"name": "g", "arguments": {}}]', [G]),
    ("granite", '<tool_call> [{"name": "g", "arguments": {}}, {"name": "g", "arguments": {}}]',
     [G, G]),
    ("granite", "<tool_call>{}", ["<tool_call>{}"]),
    ("phi4_mini_json", 'So. functools[{"name": "g", "arguments": {}}]', ["So.", G]),
    ("phi4_mini_json", "import functools", ["import functools"]),
    ("phi4_mini_json", "functools is a module", ["functools is a module"]),
    ("phi4_mini_json", "functools[]", ["functools[]"]),
    ("phi4_mini_json", "functools[3]", ["functools[3]"]),
]  # fmt: skip


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}
}}}]  # fmt: skip


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces, with adjacent texts joined."""
    whole: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and whole and isinstance(whole[-1], str):
            whole[-1] += piece
        else:
            whole.append(piece)
    return whole


def taken_apart(name: ToolCallParser, texts: list[str]) -> list[Piece]:
    parser = make_tool_parser(name, TOOLS)
    pieces = [piece for text in texts for piece in parser.push(text)]
    return joined([*pieces, *parser.flush()])


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_whole_texts_and_single_letters_parse_alike(
    name: ToolCallParser, text: str, expected: list[Piece]
) -> None:
    assert taken_apart(name, [text]) == expected
    assert taken_apart(name, list(text)) == expected


@given(data=st.data(), name=st.sampled_from(typing.get_args(ToolCallParser)))
def test_text_without_a_call_is_returned_in_full(data: st.DataObject, name: ToolCallParser) -> None:
    alphabet = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "{", "}", "[", "]", "f", " ", "\n"]
    alphabet += ["f(", ")", CALLS, CALLS_END, CHANNEL, "<|message|>", "functools", "<function=f>"]
    texts = data.draw(st.lists(st.sampled_from(alphabet), max_size=8))
    whole = "".join(texts)
    assert taken_apart(name, texts) == ([whole] if whole else [])


LONG = '{"x": [' + r'"]}", {"y": "\\\"}"}, ' * 300 + "0]}"
PYTHON = r"""[f(x=[']"}', {"y": "\"}"}, '\'', '\\', """ + "'' ']', ''' ' ]''', "
LONG_CALLS: list[tuple[ToolCallParser, str]] = [
    ("granite", f'<|tool_call|>[{{"name": "f", "arguments": {LONG}}}]'),
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {LONG}}}]'),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{LONG}"),
    ("llama3_json", f'{{"name": "f", "parameters": {LONG}}}'),
    ("openai", f"{CHANNEL}f<|message|>{LONG}{' ' * 99}<|call|>"),
    ("pythonic", PYTHON + "[(1, 2)], " * 300 + "0])]"),
]


@pytest.mark.parametrize(("name", "text"), LONG_CALLS)
def test_a_long_call_is_parsed_once(
    monkeypatch: pytest.MonkeyPatch, name: ToolCallParser, text: str
) -> None:
    """Else every token would take longer than the token before it."""
    num_parsed = 0

    def count(module: object, function: str) -> None:
        original = getattr(module, function)

        def counted(*given: Any, **named: Any) -> Any:
            nonlocal num_parsed
            num_parsed += 1
            return original(*given, **named)

        monkeypatch.setattr(module, function, counted)

    count(json.JSONDecoder, "raw_decode")
    count(ast, "parse")
    [call] = taken_apart(name, list(text))
    assert num_parsed == 1
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments)["x"][-1] == 0


@pytest.mark.parametrize("name", typing.get_args(ToolCallParser))
def test_forced_calls_are_written_as_they_are_parsed(name: ToolCallParser) -> None:
    notation = make_tool_parser(name).notation(())
    if notation is not None:
        calls = [f"{notation.head(name)}{{}}{notation.tail}" for name in "fg"]
        text = notation.opening + notation.separator.join(calls) + notation.closing
        found = [call for call in taken_apart(name, [text]) if isinstance(call, ToolCall)]
        assert [replace(call, id="") for call in found] == [ToolCall("f", "{}"), G]


def test_a_header_that_goes_on_and_on_is_text() -> None:
    header = CHANNEL + "f" * 1024
    assert joined(make_tool_parser("openai").push(header)) == [header]


def test_text_before_a_call_is_not_held_back() -> None:
    parser = make_tool_parser("hermes")
    assert parser.push("Let me") == ["Let me"]
    assert parser.push(" see <") == [" see"]
    assert parser.push("b>") == [" <b>"]
    assert parser.push("<tool_call>") == []
    assert parser.push(HERMES.removeprefix("<tool_call>")) == [F]


def test_values_in_xml_without_a_schema_are_json_if_they_can_be() -> None:
    parser = make_tool_parser("qwen3_coder", [{"type": "function"}, {"function": {"name": "f"}}])
    (call,) = [*parser.push(XML), *parser.flush()]
    assert call == X
    parser = make_tool_parser("qwen3_coder")
    text = XML.replace("\n1\n2\n", "\n12\n")
    (call,) = [*parser.push(text), *parser.flush()]
    assert isinstance(call, ToolCall)
    assert call.arguments.startswith('{"s":12,')
