"""The parts of examples/ray_data that need no Ray; tests/deploy/fleet/on_ray runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import longshore
from examples.ray_data.generate import Answerer, missing_parts
from tests.e2e.serving import ROOT

SAMPLING = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answerer]:
    source = tmp_path_factory.mktemp("answerer") / "prompts.jsonl"
    source.write_text('{"id": 7, "prompt": "ROMEO:"}\n\n{"id": 8}\n')
    answerer = Answerer(str(source), str(ROOT / "models" / "demo"), {"dtype": "fp32"}, SAMPLING)
    with answerer.llm:
        yield answerer


def answers(answerer: Answerer, *lines: object) -> list[dict[str, Any]]:
    as_bytes = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return answerer.answers(enumerate(as_bytes, 1))


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\nbb\n\nccc", "é\n" * 7, "\n\n \na\n"])
@pytest.mark.parametrize("lines_per_part", [1, 2, 100])
def test_parts_have_each_line_once(text: str, lines_per_part: int, tmp_path: Path):
    path = tmp_path / "input"
    path.write_text(text)
    data, numbers = path.read_bytes(), []
    for part in missing_parts(path, tmp_path, lines_per_part):
        numbers += range(part["first_line"], part["first_line"] + part["num_lines"])
        before = data.splitlines(keepends=True)[: part["first_line"] - 1]
        assert part["offset"] == sum(map(len, before))
    assert numbers == list(range(1, len(data.splitlines()) + 1))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "Expecting property name"),
        (b"\xff", "decode"),
        (b"7", "expected an object"),
        (b"[" * 100_000, "recursion"),
        (b'{"messages": [{"content": "\\ud800"}]}', "surrogates not allowed"),
        (b"{}", "expected a prompt, or messages"),
        (b'{"prompt": ["a"]}', "expected a prompt, or messages"),
        (b'{"messages": [{"role": "user", "content": "a"}, "a"]}', "expected a prompt, or mess"),
        (b'{"prompt": "%s"}' % (b"what light " * 2000), "length is 1024 tokens"),
    ],
)
def test_a_line_that_cannot_be_answered_is_an_error(answerer: Answerer, line: bytes, why: str):
    [row] = answers(answerer, line)
    assert why in row.pop("error")
    assert row == {"line": 1, "id": None, "text": None, "finish_reason": None}


def test_bad_lines_do_not_change_the_answers_to_others(answerer: Answerer):
    good = [{"id": str(number), "prompt": f"ROMEO {number}:"} for number in range(6)]
    good.append({"id": "chat", "messages": [{"role": "user", "content": "Who is Romeo?"}]})
    too_long = {"id": "long", "prompt": "what light " * 2000}
    alone = answers(answerer, *good)
    mixed = answers(answerer, *good[:3], too_long, *good[3:], b"{", too_long)
    assert [row["line"] for row in mixed] == list(range(1, 11))
    assert [row["id"] for row in mixed if row["error"] is not None] == ["long", None, "long"]
    texts = [row["text"] for row in mixed if row["error"] is None]
    assert texts == [row["text"] for row in alone]
    assert {row["finish_reason"] for row in alone} == {"length"}


def test_prompts_of_a_failed_step_are_tried_in_halves(
    answerer: Answerer, monkeypatch: pytest.MonkeyPatch
):
    generate = longshore.LLM.generate

    def fail(llm: longshore.LLM, prompts: list[str], *arguments: Any, **options: Any) -> Any:
        if len(prompts) > 1 or "JULIET:" in prompts:
            raise longshore.GenerationError("out of memory")
        return generate(llm, prompts, *arguments, **options)

    monkeypatch.setattr(longshore.LLM, "generate", fail)
    prompts = ("ROMEO:", "JULIET:", "NURSE:")
    rows = answers(answerer, *({"prompt": prompt} for prompt in prompts))
    assert [row["error"] for row in rows] == [None, "out of memory", None]
    assert [row["text"] is None for row in rows] == [False, True, False]


def test_parts_with_a_file_are_not_answered_again(answerer: Answerer, tmp_path: Path):
    source = Path(answerer._source)
    first, second = missing_parts(source, tmp_path, 2)
    assert answerer(first) == {"lines": 1, "errors": 0}
    assert missing_parts(source, tmp_path, 2) == [second]
    assert answerer(second) == {"lines": 1, "errors": 1}
    assert missing_parts(source, tmp_path, 2) == []
    texts = [path.read_text() for path in sorted(tmp_path.iterdir())]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    assert [(row["line"], row["id"]) for row in rows] == [(1, 7), (3, 8)]
