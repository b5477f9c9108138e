"""Parsing tool calls from model output, however the text is split."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.options import ToolCallParser
from core.text.tools.base import Piece, ToolCall
from core.text.tools.factory import make_tool_parser

HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": "\u00e9</b>"}}\n</tool_call>'
F = ToolCall("f", '{"x":"\u00e9</b>"}')
G = ToolCall("g", "{}")
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
]  # fmt: skip


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return the parts with adjacent texts joined."""
    whole: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and whole and isinstance(whole[-1], str):
            whole[-1] += piece
        else:
            whole.append(piece)
    return whole


def taken_apart(name: ToolCallParser, texts: list[str]) -> list[Piece]:
    parser = make_tool_parser(name)
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
    texts = data.draw(st.lists(st.sampled_from(alphabet), max_size=8))
    whole = "".join(texts)
    assert taken_apart(name, texts) == ([whole] if whole else [])


def test_text_before_a_call_is_not_held_back() -> None:
    parser = make_tool_parser("hermes")
    assert parser.push("Let me") == ["Let me"]
    assert parser.push(" see <") == [" see"]
    assert parser.push("b>") == [" <b>"]
    assert parser.push("<tool_call>") == []
    assert parser.push(HERMES.removeprefix("<tool_call>")) == [F]
