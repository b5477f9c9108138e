"""Logged answers that are computed again, over a fake model container that echoes requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from container.__main__ import main
from container.configuration.properties import Setting
from container.verify.difference import digest_difference, first_difference
from container.verify.verify import DIFFERENT, EQUAL, UNKNOWN, verify
from core.errors import ConfigurationError
from tests.container.configuration.test_batch import FAKE

LOGPROBS = {"tokens": ["a", "b", "c"], "token_logprobs": [-0.5, -0.25, -1.5]}
ANSWER = {"id": "x", "created": 1, "choices": [{"text": "abc", "logprobs": LOGPROBS}]}


def changed(**logprobs: list[object]) -> dict[str, Any]:
    choice = {"text": "abd", "logprobs": {**LOGPROBS, **logprobs}}
    return {"id": "y", "created": 2, "choices": [choice]}


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        ({**ANSWER, "id": "y", "created": 2, "system_fingerprint": "z"}, None),
        (
            changed(token_logprobs=[-0.5, -0.2500001, -1.75]),
            "token 2: choices[0].logprobs.token_logprobs[1] was -0.25, is -0.2500001",
        ),
        (changed(tokens=["a"]), "token 2: choices[0].logprobs.tokens[1] was 'b', is None"),
        (changed(), "choices[0].text was 'abc', is 'abd'"),
        ({**ANSWER, "usage": 1}, "usage was None, is 1"),
    ],
)
def test_the_first_difference_is_that_of_the_earliest_token(
    computed: dict[str, Any], expected: str | None
) -> None:
    assert first_difference(ANSWER, computed) == expected


def test_what_an_answer_took_is_not_compared() -> None:
    one, other = ({"usage": {"total_tokens": 9, "receipt": {"compute_ns": ns}}} for ns in (3, 4))
    assert first_difference(one, other) is None
    other["usage"]["total_tokens"] = 8
    assert first_difference(one, other) == "usage.total_tokens was 9, is 8"


def test_ids_of_tokens_are_compared() -> None:
    one, other = ({"details": {"tokens": [{"id": id, "log_prob": -1.0}]}} for id in (3, 4))
    assert first_difference(one, other) == "token 1: details.tokens[0].id was 3, is 4"


def test_the_difference_of_digests_has_names() -> None:
    assert digest_difference("aa.plain.bfloat16", "bb.plain.bfloat16") == (
        "the weights (aa then, bb here)"
    )
    made = "aa.int8.float32.float32.avx2.cc.1"
    assert digest_difference(made, f"{made}.dd") == "the variant of the model (none then, dd here)"


def log(path: Path, *answers: object) -> Path:
    path.write_text("\n".join(map(json.dumps, answers)))
    return path


def logged(url: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    return {"url": url, "request": {"prompt": "Q"}, "response": {}, **fields}


def test_each_answer_gets_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", ".")
    texts = {
        DIFFERENT: "/answers:1: differs at name was None",
        UNKNOWN: "/answers:2: cannot be computed: status 413, too much",
    }
    path = log(tmp_path / "answers", logged(), logged("/early"), logged(digest="aa.int8"))
    flags = [Setting("option.batching", "paged", "--batching")]
    assert verify(path, tmp_path, None, flags, FAKE) == UNKNOWN
    lines = [line for line in capsys.readouterr().out.splitlines() if "answers:" in line]
    assert all(text in line for text, line in zip(texts.values(), lines, strict=False))
    assert "(the request has no seed" in lines[0]
    assert "/answers:3: was computed otherwise: the weights (aa then,  here)" in lines[2]
    (_, *others) = [json.loads(line) for line in path.read_text().splitlines()]
    assert verify(log(path, others[0]), tmp_path, None, (), FAKE) == UNKNOWN
    assert verify(log(path, logged(request={"seed": 1})), tmp_path, None, (), FAKE) == DIFFERENT
    assert "no seed" not in capsys.readouterr().out
    assert EQUAL == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no answer in it"),
        ("{", "not a logged answer"),
        ('{"url": "/x"}', "missing required field `request`"),
        (json.dumps(logged(request={"stream": True})), "log requests without `stream`"),
    ],
)
def test_a_file_without_answers_is_an_error(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "answers"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        verify(path, tmp_path, None, (), FAKE)


def test_a_missing_file_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "/nowhere"]) == 2
    assert "/nowhere: No such file" in capsys.readouterr().err
