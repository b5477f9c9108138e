"""Structured outputs as grammars: accepted and rejected texts, and invalid grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from core.configuration.limits import GRAMMAR
from core.configuration.options import ToolCallParser
from core.errors import RequestError
from core.structured_outputs import StructuredOutputsParams
from core.text.grammar import grammar_text
from core.text.grammar_matcher import compile_grammar
from core.text.tools.base import ToolCall
from core.text.tools.factory import make_tool_parser
from core.text.tools.notation import Function

FUNCTIONS = (
    Function('say "x"', {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}},
                         "required": ["a"], "$defs": {"n": {"type": "integer"}}}),
    Function("get", {"type": "object", "additionalProperties": False}),
)  # fmt: skip
NOTATIONS: list[tuple[ToolCallParser, Sequence[str]]] = [
    ("hermes", ()),
    ("llama3_json", ()),
    ("mistral", ()),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("deepseek_v3", ()),
    ("deepseek_v31", make_tool_parser("deepseek_v31").special_tokens),
    ("openai", ()),
    ("openai", ("<|channel|>", "<|constrain|>", "<|message|>")),
    ("granite", ("<|tool_call|>",)),
    ("phi4_mini_json", ()),
]


class Bytes:
    """A vocabulary of single bytes and marker tokens."""

    eos_token_id = 256
    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, marks: Sequence[str] = ()) -> None:
        self.ids = {mark: 257 + at for at, mark in enumerate(marks)}
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>", *map(str.encode, marks)]
        self.special_token_ids = [256, *self.ids.values()]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text as tokens, and each marker as a single token."""
        for mark, token_id in self.ids.items():
            if mark in text:
                before, _, after = text.partition(mark)
                return [*self.encode(before), token_id, *self.encode(after)]
        return list(text.encode())


def lets_through(form: StructuredOutputsParams, text: str, marks: Sequence[str] = ()) -> bool:
    """Return whether the grammar accepts the text as a whole answer."""
    vocabulary = Bytes(marks)
    matcher = LLMatcher(LLTokenizer(vocabulary), grammar_text(form), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = vocabulary.encode(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def accepts(text: str, **form: Any) -> bool:
    return lets_through(StructuredOutputsParams(**form), text)


def test_json_allows_single_line_whitespace() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    value = {"a": 1, "b": [True, None]}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, indent="\t")):
        assert accepts(text, json=schema)
        assert accepts(text, json=json.dumps(schema))
        assert accepts(text, json_object=True)
    for text in ('{"a":  1}', '{"a":\n\n1}', '{"a":1} ', '{"a":"1"}', "{}"):
        assert not accepts(text, json=schema)
    assert not accepts("[]", json_object=True)


def test_regular_expressions_are_ascii() -> None:
    assert accepts("07/a_b", regex=r"\d\d/\w+")
    for text in ("٣٣/a", "07/é", "07/a!", "7/a", "x07/a"):
        assert not accepts(text, regex=r"\d\d/\w+")
    assert accepts("", regex="")


def test_a_choice_is_taken_literally() -> None:
    texts = ('a "b"\n', "\\d", "é😀", "start: x")
    for text in texts:
        assert accepts(text, choice=texts)
    for text in ("7", "a", 'a "b"\nc'):
        assert not accepts(text, choice=texts)


def test_grammars_in_lark_and_gbnf() -> None:
    for grammar in ('start: "a" b*\nb: "b"', 'root ::= "a" b*\nb ::= "b"', '  root::= "a" "b"*'):
        assert [accepts(text, grammar=grammar) for text in ("a", "abb", "b")] == [True, True, False]
    schema = '{"const": "root ::= x"}'
    assert accepts('"root ::= x"', json=schema)
    assert accepts('"root ::= x"', grammar=f"start: inner\ninner: %json {schema}")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"json": {"type": "objct"}}, "Invalid type: objct"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"$ref": "http://localhost/x"}}, "does not fetch"),
        ({"json": "{"}, "the schema is not JSON"),
        ({"json": "3"}, "a schema must be an object"),
        ({"json": '{"a":' * 100000}, "the schema is not JSON"),
        ({"json": '{"items":' * 500 + "{}" + "}" * 500}, "recursion limit"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: nowhere"}, 'unknown name: "nowhere"'),
        ({"grammar": "root ::= ("}, r"Expected '\)'"),
        ({"grammar": ""}, "Empty grammar"),
        ({"grammar": "x" * (GRAMMAR.maximum + 1)}, "at most 131,072 are allowed"),
    ],
)
def test_invalid_grammars_are_rejected(form: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        compile_grammar(LLTokenizer(Bytes()), grammar_text(StructuredOutputsParams(**form)))
    assert caught.value.field == "structured_outputs"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"choice": []}, "choice"),
        ({"choice": "a"}, "choice"),
        ({"regx": "a"}, "regx"),
        ({"json": 3}, "json"),
    ],
)
def test_errors_name_the_field_of_an_invalid_constraint(form: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**form)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"pattern": "\nroot ::= a", "type": "string"}},
        {"json_object": True},
        {"regex": "a/b"},
        {"choice": ("a", "b")},
        {"grammar": 'root ::= "a"'},
    ],
)
def test_a_generated_grammar_is_valid_as_a_grammar_and_unchanged(form: dict[str, Any]) -> None:
    text = grammar_text(StructuredOutputsParams(**form))
    assert grammar_text(StructuredOutputsParams(grammar=text)) == text


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install llguidance"):
        grammar_text(StructuredOutputsParams(regex="a"))


def forced(
    name: ToolCallParser, marks: Sequence[str], *, is_single: bool = False
) -> StructuredOutputsParams:
    notation = make_tool_parser(name).notation(marks)
    assert notation is not None
    return notation.form(FUNCTIONS, Bytes(marks).ids, is_single=is_single)


def written(name: ToolCallParser, marks: Sequence[str], calls: list[ToolCall]) -> str:
    """Return the calls as a model with this notation writes them."""
    notation = make_tool_parser(name).notation(marks)
    assert notation is not None
    calls_as_text = [f"{notation.head(call.name)}{call.arguments}{notation.tail}" for call in calls]
    return notation.opening + notation.separator.join(calls_as_text) + notation.closing


@given(data=st.data(), notation=st.sampled_from(NOTATIONS))
def test_forced_calls_can_be_parsed(
    data: st.DataObject, notation: tuple[ToolCallParser, Sequence[str]]
) -> None:
    number = st.integers(-99, 99).map(lambda n: ToolCall('say "x"', f'{{"a":{n}}}'))
    call = st.just(ToolCall("get", "{}")) if "[ARGS]" in notation[1] else number
    calls = data.draw(st.lists(call | st.just(ToolCall("get", "{}")), min_size=1, max_size=3))
    text = written(*notation, calls)
    assert lets_through(forced(*notation), text, notation[1])
    assert lets_through(forced(*notation, is_single=True), text, notation[1]) == (len(calls) == 1)
    parser = make_tool_parser(notation[0])
    assert [*parser.push(text), *parser.flush()] == calls


@pytest.mark.parametrize("notation", NOTATIONS)
def test_calls_that_fit_no_function_are_rejected(
    notation: tuple[ToolCallParser, Sequence[str]],
) -> None:
    for call in (ToolCall("other", "{}"), ToolCall("get", '{"a":1}'), ToolCall('say "x"', "{}")):
        assert not lets_through(forced(*notation), written(*notation, [call]), notation[1])
    assert not lets_through(forced(*notation), "So: ", notation[1])


def test_a_marker_is_a_single_token() -> None:
    """A marker that is spelled with ordinary tokens is rejected."""
    marks = ("<tool_call>", "</tool_call>")
    text = written("hermes", marks, [ToolCall("get", "{}")])
    assert lets_through(forced("hermes", marks), text, marks)
    assert not lets_through(forced("hermes", ()), text, marks)
    vocabulary = Bytes(marks)
    matcher = LLMatcher(LLTokenizer(vocabulary), grammar_text(forced("hermes", marks)), log_level=0)
    assert matcher.validate_tokens([*b"<tool_call>"]) == 0
    assert matcher.validate_tokens([vocabulary.ids["<tool_call>"]]) == 1
