"""The parts of examples/ray_data that need no Ray; tests/fleet/on_ray runs the whole example."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import longshore
from examples.ray_data.generate import Answerer, Part, main, open_output, parse, read_part, split
from tests.e2e.serving import ROOT

SAMPLING = {"max_tokens": 4, "temperature": 0}
COMMAND = ("--model", "my-model", "--sampling", json.dumps(SAMPLING), "--lines-per-part", "2")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": str(number), "prompt": f"ROMEO {number}:"} for number in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answerer]:
    folder = tmp_path_factory.mktemp("answerer")
    source, output = folder / "prompts.jsonl", folder / "answers"
    output.mkdir()
    source.write_text('{"id": 7, "prompt": "ROMEO:"}\n{"id": 8}\n')
    answerer = Answerer(
        str(source), str(output), str(ROOT / "models" / "demo"), {"dtype": "fp32"}, SAMPLING
    )
    with answerer.llm:
        yield answerer


def answers(answerer: Answerer, *lines: object) -> list[dict[str, object]]:
    as_bytes = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return answerer.answers(enumerate(as_bytes, 1))


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\nbb\n\nccc", "é\n" * 7, "\n\n \na\n"])
@pytest.mark.parametrize("lines_per_part", [1, 2, 100])
def test_parts_have_each_line_once(text: str, lines_per_part: int, tmp_path: Path):
    path = tmp_path / "input"
    path.write_text(text)
    parts, _ = split(path, lines_per_part)
    found = [line for part in parts for line in read_part(path, part)]
    whole = enumerate(path.read_bytes().splitlines(keepends=True), 1)
    assert found == [(number, line) for number, line in whole if line.strip()]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "Expecting property name"),
        (b"\xff", "decode"),
        (b"7", "expected an object, not 7"),
        (b'{"id": [], "prompt": "a"}', "id: expected a string or an integer"),
        (b'{"id": true, "prompt": "a"}', "id: expected a string or an integer"),
        (b'{"prompt": "a", "max_tokens": 3}', "max_tokens: unknown; a line has id, prompt"),
        (b'{"messages": [{"content": "\\ud800"}]}', "surrogates not allowed"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_lines_that_are_not_valid(line: bytes, why: str):
    with pytest.raises(ValueError, match=why):
        parse(line)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"id": 1}, "expected a prompt, or messages"),
        ({"id": 1, "prompt": ["a"]}, "expected a prompt, or messages"),
        ({"id": 1, "messages": []}, "expected a prompt, or messages"),
        (
            {"id": 1, "messages": [{"role": "user", "content": "a"}, "a"]},
            "expected a prompt, or messages",
        ),
        ({"id": 1, "prompt": "a", "messages": [{}]}, "both prompt and messages"),
        ({"id": 1, "prompt": "what light " * 2000}, "at most 1023 fit"),
        (
            {"id": 1, "messages": [{"role": "user", "content": ["a"]}]},
            "expected a prompt, or messages",
        ),
        ({"id": 1, "messages": [{"role": "x", "content": "a", "tool_calls": 1}]}, "or messages"),
    ],
)
def test_a_line_that_cannot_be_answered_is_an_error(
    answerer: Answerer, fields: dict[str, object], why: str
):
    [row] = answers(answerer, fields)
    assert why in str(row.pop("error"))
    assert row == {"line": 1, "id": 1, "text": None, "finish_reason": None}


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


def test_a_part_that_is_written_is_not_answered_again(answerer: Answerer):
    """The actor that wrote the file died afterwards, so the part is tried again."""
    row = {"number": 0, "first_line": 1, "offset": 0, "num_lines": 2}
    counts = {"num_lines": 2, "num_errors": 1}
    assert answerer(row) == counts
    path = Part(**row).path(answerer.output)
    text = path.read_text()
    assert [json.loads(line)["id"] for line in text.splitlines()] == [7, 8]
    path.write_text(text.replace('"id": 7', '"id": 70'))
    assert answerer(row) == counts
    assert '"id": 70' in path.read_text()


def test_a_complete_output_needs_no_ray(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    parts, digest = split(source, 2)
    settings = {"model": "my-model", "options": {}, "sampling": SAMPLING, "lines_per_part": 2}
    output = tmp_path / "answers"
    open_output(output, {"input_sha256": digest, **settings})
    for part in parts:
        part.path(output).write_text("")
    unfinished = output / f".part-00000001.jsonl.{uuid4().hex}"
    unfinished.write_text("")
    own = output / ".part-of-somebody-else"
    own.write_text("")
    command = ["--input", str(source), "--output", str(output), *COMMAND]
    assert main(command) == 0
    assert "0 of 5 lines" in capsys.readouterr().out
    assert not unfinished.exists()
    assert own.exists()
    source.write_text("{}")
    assert main(command) == 2
    assert "input_sha256" in capsys.readouterr().err
    (output / "run.json").unlink()
    assert main(command) == 2
    assert "has parts, but no run.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (["--model", "other"], 'model="my-model", not "other"'),
        (["--lines-per-part", "3"], "lines_per_part=2, not 3"),
        (["--sampling", '{"max_tokens": 5}'], '"max_tokens": 5'),
    ],
)
def test_answers_of_different_runs_are_not_mixed(
    changed: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "prompts.jsonl"
    source.write_text("")
    output = tmp_path / "answers"
    command = ["--input", str(source), "--output", str(output), *COMMAND]
    assert main([*command, *changed]) == 0
    assert main(command) == 0  # the run with other settings answered nothing
    (output / "part-00000000.jsonl").write_text("")
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, *changed]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--sampling", '{"max_tokens": 0}'], "max_tokens: must be at least 1"),
        (["--sampling", '{"n": 2}'], "n=2: a line has one answer"),
        (["--sampling", "[]"], "expected an object"),
        (["--options", "{"], "Expecting property name"),
        (["--actors", "0"], "expected a number from 1"),
        (["--input", "no-such-file"], "no-such-file"),
    ],
)
def test_wrong_arguments_are_errors_before_ray_starts(
    arguments: list[str], why: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["--input", str(source), "--output", str(tmp_path / "a"), *COMMAND, *arguments]
    assert exit_code(command) == 2
    assert why in capsys.readouterr().err


def exit_code(command: list[str]) -> object:
    try:
        return main(command)
    except SystemExit as end:  # argparse raises it
        return end.code
