"""The limits of core/configuration/limits.py: requests beyond them are refused before any work is
done."""

from __future__ import annotations

import json

import pytest
from flask.testing import FlaskClient

from container.schema.body import read_csv
from container.schema.json_body import decode_json
from core.configuration import limits
from core.errors import RequestError
from core.protocol.messages import Submit
from tests.container.fake_engine import FakeEngine
from tests.container.invocations import invoke

VALUES, OBJECTS, DEPTH = (
    limit.maximum for limit in (limits.JSON_VALUES, limits.JSON_OBJECTS, limits.JSON_DEPTH)
)


def refusal(data: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        decode_json(data, "body")
    return str(caught.value)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b"1," * (VALUES - 2) + b"1]",
        b"[" + b"[]," * (OBJECTS - 2) + b"1]",
        json.dumps(["[" * OBJECTS, ":" * OBJECTS, "," * VALUES]).encode(),
        json.dumps({"inputs": '"[{:,' * VALUES + "\\" * 9}).encode(),
        nested(DEPTH),
    ],
    ids=["values", "lists", "characters in strings", "escaped quotes", "depth"],
)
def test_json_within_the_limits_is_decoded(data: bytes) -> None:
    assert decode_json(data, "body") == json.loads(data)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"[" + b"1," * VALUES + b"1]", "524,289 JSON values"),
        (b"[" + b'"",' * VALUES + b'""]', "524,289 JSON values"),
        (b"[" + b"[]," * OBJECTS + b"1]", "65,537 JSON lists"),
        (b"{" + b'"a":1,' * OBJECTS + b'"a":1}', "65,537 JSON lists"),
        (nested(DEPTH + 1), "nested deeper than 128 levels"),
        (b'{"a":' * DEPTH + b"[]" + b"}" * DEPTH, "nested deeper than 128 levels"),
        (nested(2000), "nested deeper than 128 levels"),
    ],
    ids=["values", "strings", "lists", "keys", "lists in lists", "objects in objects", "very deep"],
)
def test_json_beyond_a_limit_is_refused(data: bytes, error: str) -> None:
    assert error in refusal(data)


def test_csv_rows_beyond_the_limit_are_not_read() -> None:
    rows = b"a\n" * limits.INPUTS.maximum
    inputs = read_csv(b"inputs\n" + rows)["inputs"]
    assert inputs == ["a"] * limits.INPUTS.maximum
    # The last row has an unclosed quote, which would be an error if that row were read.
    read = read_csv(b"inputs\n" + rows + b'a\n"')["inputs"]
    assert len(read) == limits.INPUTS.maximum + 1  # pyright: ignore[reportArgumentType]


def test_a_csv_body_has_a_limit_of_its_own(http: FlaskClient, engine: FakeEngine) -> None:
    body = b"inputs\n" + b"," * limits.CSV_BYTES.maximum
    response = http.post("/invocations", data=body, content_type="text/csv")
    assert response.status_code == 413
    assert "the maximum for text/csv" in response.get_json()["error"]
    assert not engine.of_type(Submit)


@pytest.mark.parametrize(
    ("name", "limit", "value"),
    [
        ("bad_words", limits.BAD_WORDS, "x"),
        ("stop_token_ids", limits.STOP_TOKEN_IDS, 1),
        ("allowed_token_ids", limits.ALLOWED_TOKEN_IDS, 1),
    ],
)
def test_lists_have_a_maximum(
    http: FlaskClient, name: str, limit: limits.Limit, value: object
) -> None:
    assert invoke(http, **{name: [value] * limit.maximum}).status_code == 200
    response = invoke(http, **{name: [value] * (limit.maximum + 1)})
    assert (response.status_code, response.get_json()["field"]) == (400, f"parameters.{name}")
    assert f"at most {limit.maximum:,} are allowed" in response.get_json()["error"]


def test_objects_have_a_maximum(http: FlaskClient) -> None:
    biases = {f"{token_id}": 1 for token_id in range(limits.LOGIT_BIAS.maximum + 1)}
    response = invoke(http, logit_bias=biases)
    assert (response.status_code, response.get_json()["field"]) == (400, "parameters.logit_bias")


def test_characters_of_bad_words_have_a_maximum(http: FlaskClient) -> None:
    word = "x" * (limits.BAD_WORDS_CHARACTERS.maximum + 1)
    response = invoke(http, bad_words=[word])
    assert (response.status_code, response.get_json()["field"]) == (400, "parameters.bad_words")


def test_bad_words_are_tokenized_once_for_a_batch(http: FlaskClient, engine: FakeEngine) -> None:
    assert invoke(http, ["a", "b"], bad_words=["c"]).status_code == 200
    first, second = (submit.params.bad_words for submit in engine.of_type(Submit))
    assert first == second
    assert all(isinstance(word, tuple) for word in first)


def test_messages_and_tokens_have_a_maximum(http: FlaskClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "x"}] * (limits.MESSAGES.maximum + 1)
    response = http.post("/v1/chat/completions", json={"messages": messages})
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "messages")
    tokens = [1] * (limits.TOKEN_IDS.maximum + 1)
    response = http.post("/detokenize", json={"tokens": tokens})
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "tokens")
    assert not engine.of_type(Submit)


def test_arguments_of_tool_calls_are_limited_like_a_body(http: FlaskClient) -> None:
    call = {"function": {"name": "f", "arguments": '{"a":' + nested(DEPTH).decode() + "}"}}
    message = {"role": "assistant", "tool_calls": [call]}
    response = http.post("/v1/chat/completions", json={"messages": [message]})
    assert response.status_code == 400
    assert "nested deeper" in response.get_json()["error"]["message"]


def test_text_for_tokenize_has_a_maximum(http: FlaskClient) -> None:
    """The context has 100 tokens, and the longest token of the vocabulary has 5 characters."""
    response = http.post("/tokenize", json={"prompt": "x" * 501})
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "prompt")
    assert http.post("/tokenize", json={"prompt": "x" * 500}).get_json()["count"] == 500


def test_many_tokens_are_decoded(http: FlaskClient) -> None:
    tokens = [100] * 5000
    text = http.post("/detokenize", json={"tokens": tokens}).get_json()["prompt"]
    assert len(set(text)) == 1
    assert len(text) == 5000
