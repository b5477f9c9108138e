"""The text schema: accepted fields and the errors for invalid ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.apis.generation.sampling import SAMPLING_FIELDS
from container.apis.generation.structured_outputs import STRUCTURED_OUTPUT_FIELDS
from container.apis.text.schema import TextRequest, read_text_request
from container.front_end.contract import field_tables
from container.schema.body import read_csv, read_json, read_text
from core.configuration.limits import STOP_STRINGS
from core.errors import RequestError
from core.sampling import SamplingParams

ROOT = Path(__file__).parents[3]
JSON = "application/json"
READERS = {JSON: read_json, "text/plain": read_text, "text/csv": read_csv}


def parse_request(body: bytes, content_type: str) -> TextRequest:
    return read_text_request(READERS[content_type](body))


def request(body: object) -> bytes:
    return json.dumps(body).encode()


def test_defaults_are_greedy_with_thirty_tokens() -> None:
    read = parse_request(request({"inputs": "hi"}), JSON)
    assert read.decoding.params.temperature == 0
    assert read.decoding.params.max_tokens == 30
    assert read.decoding.params.seed is None
    assert (read.stream, read.details, read.return_full_text) == (False, False, False)
    assert read.decoding.params.skip_special_tokens


def test_lmis_usual_parameters_are_accepted() -> None:
    parameters = {
        "do_sample": True,
        "temperature": 1,
        "top_k": 5,
        "top_p": 0.5,
        "repetition_penalty": 1.1,
        "max_new_tokens": 7,
        "seed": 3,
        "stop_sequences": ["a", "b"],
        "stop_token_ids": [4],
        "ignore_eos_token": True,
        "details": True,
        "return_full_text": True,
        "skip_special_tokens": False,
    }
    read = parse_request(request({"inputs": "hi", "parameters": parameters}), JSON)
    assert read.decoding.params.temperature == 1.0
    assert (
        read.decoding.params.top_k,
        read.decoding.params.top_p,
        read.decoding.params.seed,
    ) == (5, 0.5, 3)
    assert read.decoding.params.repetition_penalty == 1.1
    assert (read.decoding.params.max_tokens, read.decoding.params.ignore_eos) == (7, True)
    assert (read.decoding.params.stop, read.decoding.params.stop_token_ids) == (("a", "b"), (4,))
    assert (read.details, read.return_full_text, read.decoding.params.skip_special_tokens) == (
        True,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0}, 0.0),
        ({"top_p": 0.5}, 0.0),
        ({"temperature": None, "do_sample": None}, 0.0),
    ],
)
def test_parameters_that_enable_sampling(parameters: dict[str, object], temperature: float) -> None:
    read = parse_request(request({"inputs": "hi", "parameters": parameters}), JSON)
    assert read.decoding.params.temperature == temperature


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": "hi", "stream": True},
        {"inputs": "hi", "parameters": {"stream": True}},
    ],
)
def test_stream_may_be_at_either_level(body: object) -> None:
    assert parse_request(request(body), JSON).stream


def test_aliases() -> None:
    parameters = {"stop": ["x"], "ignore_eos": True}
    read = parse_request(request({"inputs": "hi", "parameters": parameters}), JSON)
    assert (read.decoding.params.stop, read.decoding.params.ignore_eos) == (("x",), True)


def test_a_plain_text_body_is_the_input() -> None:
    assert parse_request("h\u00e9".encode(), "text/plain").text == "h\u00e9"


BAD = [
    (b"", "body", "empty"),
    (b"  ", "body", "empty"),
    (b'{"inputs": ', "body", "not JSON"),
    (b"\xff", "body", "UTF-8"),
    (b'{"inputs": "\xff"}', "body", "UTF-8"),
    (b"[" * 100_000, "body", "nested"),
    (b"[]", "body", "object"),
    (b'"text"', "body", "object"),
    (b'{"inputs": "a", "parameters": {"top_p": NaN}}', "body", "not JSON"),
    (b'{"inputs": "a", "parameters": {"top_p": 1e999}}', "body", "not JSON"),
    (b'{"inputs": "a", "parameters": {"seed": ' + b"9" * 5000 + b"}}", "body", "not JSON"),
    (request({}), "inputs", "a non-empty string"),
    (request({"inputs": ""}), "inputs", "non-empty"),
    (request({"inputs": []}), "inputs", "1 to 1024 inputs"),
    (request({"inputs": ["a"] * 1025}), "inputs", "1 to 1024 inputs"),
    (request({"inputs": 5}), "inputs", "a non-empty string"),
    (request({"input": "a"}), "input", "did you mean 'inputs'"),
    (request({"inputs": "a", "messages": []}), "messages", "no such field"),
    (request({"inputs": "a", "stream": "yes"}), "stream", "true or false"),
    (request({"inputs": "a", "parameters": []}), "parameters", "object"),
]
BAD_CSV = [
    (b"", "one column"),
    (b"text\na\n", "one column named inputs"),
    (b"inputs,more\na,b\n", "one column"),
    (b"inputs\na,b\n", "more than one"),
    (b'inputs\n"a', "not CSV"),
    (b"inputs\n\xff", "UTF-8"),
]
BAD_PARAMETERS: list[tuple[dict[str, object], str, str]] = [
    ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"temperature": True}, "temperature", "a number"),
    ({"temperature": -1}, "temperature", "0 to 1e"),
    ({"temperature": 10**30}, "temperature", "a number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "at most 1"),
    ({"top_k": 1.5}, "top_k", "an integer"),
    ({"top_k": -2}, "top_k", "-1 to 2147483647"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01 to 100"),
    ({"max_new_tokens": 0}, "max_new_tokens", "1 to 2147483647"),
    ({"max_new_tokens": "7"}, "max_new_tokens", "an integer"),
    ({"max_new_tokens": 7.0}, "max_new_tokens", "an integer"),
    ({"seed": -2}, "seed", "0 to"),
    ({"seed": 2**64}, "seed", "an integer"),
    ({"details": 1}, "details", "true or false"),
    ({"truncate": 0}, "truncate", "from 1 to 2147483647"),
    ({"decoder_input_details": True, "stream": True}, "decoder_input_details", "stream"),
    ({"n": 0}, "n", "1 to 128"),
    ({"n": 2}, "n", "needs details"),
    ({"n": 2, "details": True, "stream": True}, "n", "combined with stream"),
    ({"n": 2, "num_return_sequences": 2}, "num_return_sequences", "twice"),
    ({"n": 3, "best_of": 2, "details": True}, "best_of", "n to 128"),
    ({"top_n_tokens": 2}, "top_n_tokens", "needs details"),
    ({"top_n_tokens": 21, "details": True}, "top_n_tokens", "0 to 20"),
    ({"prompt_logprobs": 2}, "prompt_logprobs", "needs details"),
    ({"prompt_logprobs": 2, "details": True, "stream": True}, "prompt_logprobs", "stream"),
    ({"num_beams": 3, "do_sample": True}, "do_sample", "beam search"),
    ({"num_beams": 3, "best_of": 2}, "best_of", "differs from num_beams"),
    ({"num_beams": 3, "details": True, "decoder_input_details": True}, "decoder_input_details",
     "beam search"),
    ({"early_stopping": "often"}, "early_stopping", 'true, false or "never"'),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"n": "2"}, "n", "an integer"),
    ({"stop_sequences": 1}, "stop_sequences", "list of strings"),
    ({"stop_sequences": [1]}, "stop_sequences", "list of strings"),
    ({"stop_sequences": [""]}, "stop_sequences", "empty"),
    ({"stop": ["x"] * (STOP_STRINGS.maximum + 1)}, "stop_sequences", "at most 16"),
    ({"stop": ["x" * 1001]}, "stop_sequences", "characters"),
    ({"stop": ["x"], "stop_sequences": ["y"]}, "stop_sequences", "twice"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids", "list of token ids"),
    ({"stream": 1}, "stream", "true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "message"), BAD)
def test_invalid_bodies_are_described(body: bytes, field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse_request(body, JSON)
    assert caught.value.field == field


@pytest.mark.parametrize(("parameters", "name", "message"), BAD_PARAMETERS)
def test_invalid_parameters_are_named(parameters: object, name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse_request(request({"inputs": "a", "parameters": parameters}), JSON)
    assert caught.value.field == f"parameters.{name}"


@pytest.mark.parametrize(("body", "message"), BAD_CSV)
def test_invalid_csv_is_described(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse_request(body, "text/csv")
    assert caught.value.field == "body"


TEXTS = st.text("ab\u00e9", max_size=3)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
NAMES = st.sampled_from(["temperature", "top_k", "seed", "stop", "max_new_tokens", "details"])


@given(body=st.binary())
def test_arbitrary_bodies_raise_only_request_errors(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_request(body, JSON)


@given(parameters=st.dictionaries(NAMES, JSON_VALUES))
def test_arbitrary_parameters_raise_only_request_errors(parameters: dict[str, object]) -> None:
    try:
        read = parse_request(request({"inputs": "a", "parameters": parameters}), JSON)
    except RequestError:
        return
    assert read.text == "a"


SAMPLED: Mapping[str, object] = {
    "temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "typical_p": 0.9,
    "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 4,
    "min_tokens": 2, "stop_token_ids": [7], "bad_words": ["x"], "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "include_stop_str_in_output": True,
    "detokenize": False, "priority": 3, "cache_salt": "a", "n": 2, "best_of": 3,
    "prompt_logprobs": 4, "allowed_token_ids": [5, 6], "no_repeat_ngram_size": 3,
    "logit_bias": {"5": -1},
}  # fmt: skip
BEAMS: Mapping[str, object] = {
    "num_beams": 4, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": True
}  # fmt: skip


@pytest.mark.parametrize("parameters", [SAMPLED, BEAMS], ids=["sampled", "beams"])
def test_every_sampling_parameter_reaches_the_engine(parameters: Mapping[str, object]) -> None:
    """The engine gets each parameter with the name and the value of the request."""
    body = {"inputs": "a", "parameters": {**parameters, "details": True}}
    got = parse_request(request(body), JSON).decoding.params
    for name, value in parameters.items():
        expected = tuple(value) if isinstance(value, list) else value
        expected = {5: -1.0} if name == "logit_bias" else expected
        assert getattr(got, name) == expected, name


def test_every_field_is_read_somewhere():
    """A field that is named only in its table would be accepted and then ignored."""
    code = "".join(path.read_text() for path in (ROOT / "container").rglob("*.py"))
    fields = {
        field.canonical_name or name
        for table in field_tables().values()
        for name, field in table.items()
        if field.effect == "supported"
    }
    once = {name for name in fields if code.count(f'"{name}"') < 2}
    elsewhere = {*SamplingParams.__struct_fields__, *STRUCTURED_OUTPUT_FIELDS}
    assert once - elsewhere == set(), "no code reads these fields"


def test_no_sampling_parameter_is_forgotten():
    own = {"max_tokens", "stop", "ignore_eos", "logprobs", "truncate_prompt_tokens"}
    shared = set(SamplingParams.__struct_fields__) - own
    assert shared <= SAMPLING_FIELDS.keys(), "no API reads these; see SAMPLING_FIELDS"
    assert shared - STRUCTURED_OUTPUT_FIELDS.keys() == {*SAMPLED, *BEAMS}, "each has a test value"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, (1, None)),
        ({"best_of": 3}, (1, 3)),
        ({"best_of": 3, "details": True}, (3, 3)),
        ({"best_of": 3, "details": True, "stream": True}, (1, 3)),
        ({"best_of": 3, "details": True, "n": 1}, (1, 3)),
        ({"num_return_sequences": 2, "details": True}, (2, 2)),
        ({"num_beams": 4, "num_return_sequences": 2, "details": True}, (2, None)),
        ({"use_beam_search": True, "best_of": 3, "details": True}, (3, 3)),
    ],
)
def test_number_of_answers(parameters: object, expected: tuple[int, int | None]) -> None:
    """`best_of` without n returns all answers if the response can show them: with details and
    without stream. With n, only the n best answers are returned."""
    params = parse_request(request({"inputs": "a", "parameters": parameters}), JSON).decoding.params
    assert (params.n, params.best_of) == expected


def test_beam_search_uses_transformers_parameter_names() -> None:
    parameters = {"num_beams": 3, "length_penalty": 0.5, "early_stopping": "never"}
    read = parse_request(request({"inputs": "a", "parameters": parameters}), JSON)
    params = read.decoding.params
    assert (params.beam_width, params.length_penalty, params.early_stopping) == (3, 0.5, "never")
    assert read.warnings == ()
