"""Separating reasoning from the rest of model output, however the text is split."""

from __future__ import annotations

import typing
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.configuration.options import ReasoningParserName
from core.text.answer import TokenText
from core.text.answer_parser import AnswerParser
from core.text.reasoning.base import Reasoning
from core.text.reasoning.factory import find_reasoning_parser, make_reasoning_parser
from core.text.tools.base import ToolCall
from core.text.tools.factory import make_tool_parser

CALL = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
R = Reasoning
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
CASES: list[tuple[ReasoningParserName, str, str, list[Reasoning | str]]] = [
    ("qwen3", "a:", "<think>\nWell, <b>\n</think>\n\nHi <b>", [R("Well, <b>"), "Hi <b>"]),
    ("qwen3", "a:", "<think>\n\n</think>\n\nHi", ["Hi"]),
    ("qwen3", "a:", " Hi </think>", [" Hi </think>"]),
    ("qwen3", "a:", "<thin", ["<thin"]),
    ("qwen3", "a:", "<think>\nWell </th", [R("Well </th")]),
    ("qwen3", "a:", "<think>", []),
    ("qwen3", "a:<think>\n", "Well </think>Hi", [R("Well"), "Hi"]),
    ("qwen3", "a:<think>\n", "<think>Well </think>Hi", [R("Well"), "Hi"]),
    ("qwen3", "a:<think>\n\n</think>\n\n", "\nHi <think>", ["\nHi <think>"]),
    ("deepseek_r1", "a:", "Well\n\nthen </think>\n", [R("Well\n\nthen")]),
    ("deepseek_r1", "a:", "<think>Well</think>Hi", [R("Well"), "Hi"]),
    ("deepseek_r1", "a:</think>", "Hi", ["Hi"]),
    ("mistral", "a:", "[THINK]Well[/THINK]Hi", [R("Well"), "Hi"]),
    ("seed_oss", "a:", "<seed:think>Well</seed:think>Hi", [R("Well"), "Hi"]),
    ("openai_gptoss", "", f"{ANALYSIS}Well{NEXT}{FINAL}Hi<|return|>", [R("Well"), "Hi"]),
    ("openai_gptoss", "", f"{ANALYSIS}Well{NEXT}{FINAL}Hi", [R("Well"), "Hi"]),
    ("openai_gptoss", "", f"{ANALYSIS}Well, <|", [R("Well, <|")]),
    ("openai_gptoss", "", f"{ANALYSIS}Well{NEXT}<|chan", [R("Well")]),
    ("openai_gptoss", "", '{"a": 1}', ['{"a": 1}']),
    ("openai_gptoss", "", "<|channel|>", []),
    ("openai_gptoss", "", "<|channel|>analysis", []),
    ("openai_gptoss", "", " to=functions.f<|channel|>comm", []),
    ("openai_gptoss", "", "to be", ["to be"]),
    ("openai_gptoss", "", "assistant", ["assistant"]),
    ("openai_gptoss", "", "<|channel|>commentary<|message|>So<|end|>", ["So"]),
    ("openai_gptoss", "",
     f"{ANALYSIS}W{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}",
     [R("W"), HARMONY_CALL.removesuffix("<|call|>")]),
    ("openai_gptoss", "",
     f"{ANALYSIS}W{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
     [R("W"), HARMONY_CALL]),
]  # fmt: skip


def joined(parts: list[Reasoning | str]) -> list[Reasoning | str]:
    """Return the parts, with adjacent parts of the same kind joined."""
    whole: list[Reasoning | str] = []
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        text = "".join(part if isinstance(part, str) else part.text for part in run)
        whole.append(text if is_text else Reasoning(text))
    return whole


def taken_apart(name: ReasoningParserName, prompt: str, texts: list[str]) -> list[Reasoning | str]:
    parser = make_reasoning_parser(name, prompt)
    parts = [part for text in texts for part in parser.push(text)]
    return joined([*parts, *parser.flush()])


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), CASES)
def test_whole_texts_and_single_letters_parse_alike(
    name: ReasoningParserName, prompt: str, text: str, expected: list[Reasoning | str]
) -> None:
    assert taken_apart(name, prompt, [text]) == expected
    assert taken_apart(name, prompt, list(text)) == expected


@given(data=st.data(), name=st.sampled_from(typing.get_args(ReasoningParserName)))
def test_the_split_of_a_text_changes_nothing(
    data: st.DataObject, name: ReasoningParserName
) -> None:
    alphabet = ["<think>", "</think>", "[/THINK]", *ANALYSIS.partition(">"), FINAL, NEXT, "a", "\n"]
    texts = data.draw(st.lists(st.sampled_from(alphabet), max_size=8))
    whole = taken_apart(name, "a:", ["".join(texts)])
    assert taken_apart(name, "a:", texts) == whole
    assert taken_apart(name, "a:", list("".join(texts))) == whole


def test_reasoning_is_not_held_back() -> None:
    parser = make_reasoning_parser("qwen3", "a:")
    assert parser.push("<think>") == []
    assert parser.push("\nWell") == [R("Well")]
    assert parser.push(" then <") == [R(" then")]
    assert parser.push("b>") == [R(" <b>")]
    assert parser.push("</think>\n\n") == []
    assert parser.push("Hi") == ["Hi"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("[THINK]{{ message.thinking }}[/THINK]", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}", "openai_gptoss"),
        ("<seed:think>{{ x }}</seed:think>", "seed_oss"),
        ("<|im_start|>{{ message.content }}<|im_end|>", None),
    ],
)
def test_templates_show_the_parser(template: str, name: ReasoningParserName | None) -> None:
    assert find_reasoning_parser(template) == name


@pytest.mark.parametrize("per_push", [1, 3, 100])
def test_reasoning_then_text_then_a_call(per_push: int) -> None:
    text = f"<think>I call <tool_call></think>So: {CALL}"
    tokens = [TokenText(0, letter, 0.0) for letter in text]
    parser = AnswerParser(make_reasoning_parser("qwen3", ""), make_tool_parser("hermes"))
    pieces = [
        piece
        for start in range(0, len(tokens), per_push)
        for piece in parser.push(
            tokens[start : start + per_push], is_last=start + per_push >= len(tokens)
        )
    ]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == (
        "I call <tool_call>"
    )
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == "So:"
    assert pieces[-1] == ToolCall("g", "{}")
    assert parser.num_reasoning_tokens == len("I call <tool_call></think>"), (
        "each letter is a token"
    )
