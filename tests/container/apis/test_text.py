"""LMI's text schema with a fake engine: responses, and the parameters sent to the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from container.front_end.app import create_app
from container.http.off_loop import LONG_TEXT_CHARACTERS
from container.wire.engine_client import EngineClient
from core.configuration.options import make_options
from core.protocol.messages import Abort, Submit
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS, Serve, eventually
from tests.container.fake_engine import FakeEngine, says, stalls
from tests.container.invocations import invoke, records, stream


@pytest.fixture
def reply(engine: FakeEngine, tokenizer: Tokenizer) -> Any:
    """Return a function that makes the engine answer every request with a text."""

    def set_reply(text: str, **options: int) -> None:
        engine.script = says([*tokenizer.encode(text), EOS], **options)

    return set_reply


@pytest.fixture
def rolling(serve: Serve) -> FlaskClient:
    """A client of an app whose answers have the shape of LMI's rolling batch."""
    return serve(rolling_batch="vllm")


def test_generated_text(http: FlaskClient) -> None:
    response = invoke(http)
    assert response.status_code == 200
    assert response.mimetype == "application/json"
    assert response.get_json() == {"generated_text": "Hi there"}


def test_generated_text_with_details(rolling: FlaskClient) -> None:
    answer = invoke(rolling, details=True, max_new_tokens=2).get_json()
    assert answer["generated_text"] == "Hi"
    details = answer["details"]
    assert details["finish_reason"] == "length"
    assert (details["generated_tokens"], details["inputs"]) == (2, "Q")
    assert [token["text"] for token in details["tokens"]] == ["H", "i"]
    assert [token["log_prob"] for token in details["tokens"]] == [-0.5, -0.5]


def test_the_eos_token_has_no_text(http: FlaskClient) -> None:
    details = invoke(http, details=True).get_json()["details"]
    assert details["finish_reason"] == "eos_token"
    assert details["tokens"][-1] == {"id": EOS, "text": "", "logprob": -0.5}
    shown = invoke(http, skip_special_tokens=False).get_json()
    assert shown == {"generated_text": "Hi there<eos>"}


def test_return_full_text(http: FlaskClient) -> None:
    assert invoke(http, return_full_text=True).get_json() == {"generated_text": "QHi there"}
    assert records(stream(http, return_full_text=True))[-1]["generated_text"] == "QHi there"


def test_json_lines_stream(rolling: FlaskClient) -> None:
    response = stream(rolling, max_new_tokens=2, details=True)
    assert response.mimetype == "application/jsonlines"
    first, last = records(response)
    assert first["token"]["text"] == "H"
    assert set(first) == {"token"}
    assert last["token"]["text"] == "i"
    assert last["generated_text"] == "Hi"
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 2, "inputs": "Q"}
    assert response.get_data().endswith(b"\n")


def test_stream_without_details(rolling: FlaskClient) -> None:
    assert "details" not in records(stream(rolling))[-1]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"logprob"}),
        ({"rolling_batch": "auto"}, {"logprob"}),
        ({"rolling_batch": "scheduler"}, {"log_prob"}),
        ({"rolling_batch": "vllm", "async_mode": True}, {"logprob"}),
        ({"async_mode": False}, {"log_prob"}),
        ({"tgi_compat": True}, {"logprob", "special"}),
    ],
)
def test_options_choose_the_shape_of_answers(
    serve: Serve, options: dict[str, Any], names: set[str]
) -> None:
    """The default is the shape of LMI's asynchronous mode, as in LMI since version 17.

    A rolling_batch other than auto makes the shape of LMI's rolling batch the default.
    """
    last = json.loads(
        stream(serve(**options), accept="application/jsonlines").data.splitlines()[-1]
    )
    assert last["token"].keys() == {"id", "text", *names}
    assert ("index" in last) == ("logprob" in names)


def test_event_stream(rolling: FlaskClient) -> None:
    response = stream(rolling, accept="text/event-stream", max_new_tokens=1)
    assert response.mimetype == "text/event-stream"
    data = response.get_data()
    assert data.startswith(b'data: {"token":')
    assert data.endswith(b"}\n\n")


@pytest.mark.parametrize(
    ("formatter", "accept", "mimetype"),
    [
        ("json", "*/*", "application/jsonlines"),
        ("jsonlines", "text/event-stream, */*;q=0.1", "text/event-stream"),
        ("sse", "*/*", "text/event-stream"),
        ("sse", "", "text/event-stream"),
        ("sse", "application/jsonlines", "application/jsonlines"),
        ("sse", "application/json", "text/event-stream"),
    ],
)
def test_stream_formats(
    client: EngineClient, tokenizer: Tokenizer, formatter: Any, accept: str, mimetype: str
) -> None:
    http = create_app(
        client, tokenizer, make_options({"output_formatter": formatter}), "demo"
    ).test_client()
    response = stream(http, accept=accept)
    assert response.mimetype == mimetype
    response.get_data()


@pytest.mark.parametrize("per_step", [1, 2, 100])
def test_characters_are_never_split(http: FlaskClient, reply: Any, per_step: int) -> None:
    text = "h\u00e9 \u65e5\u672c \U0001f642!"
    reply(text, per_step=per_step)
    assert invoke(http).get_json() == {"generated_text": text}
    texts = [record["token"]["text"] for record in records(stream(http))]
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


def test_an_incomplete_last_character_is_replaced(http: FlaskClient, reply: Any) -> None:
    reply("a\U0001f642")
    assert invoke(http, max_new_tokens=3).get_json() == {"generated_text": "a\ufffd"}
    assert records(stream(http, max_new_tokens=3))[-1]["generated_text"] == "a\ufffd"


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings(
    http: FlaskClient, reply: Any, engine: FakeEngine, per_step: int, streamed: bool
) -> None:
    reply("Hello there, \u00e9nd of it", per_step=per_step)
    parameters = {"stop_sequences": ["nothing", ", \u00e9n"], "details": True}
    answer = records(stream(http, **parameters))[-1] if streamed else None
    answer = answer or invoke(http, **parameters).get_json()
    assert answer["generated_text"] == "Hello there"
    assert answer["details"]["finish_reason"] == "stop_sequence"


def test_a_stop_string_aborts_the_request(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = stalls(after=tokenizer.encode("cab"))
    assert invoke(http, stop=["ab"]).get_json() == {"generated_text": "c"}
    eventually(lambda: engine.of_type(Abort))


def test_parameters_sent_to_the_engine(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    invoke(http, "Hello", temperature=0.5, seed=3, max_new_tokens=9)
    (submit,) = engine.of_type(Submit)
    assert isinstance(submit, Submit)
    assert submit.prompt_token_ids == tokenizer.encode("Hello")
    assert (submit.params.temperature, submit.params.seed, submit.params.max_tokens) == (0.5, 3, 9)


def test_truncation(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    invoke(http, "x" * 200 + "end", truncate=4)
    (submit,) = engine.of_type(Submit)
    assert isinstance(submit, Submit)
    assert tokenizer.decode(submit.prompt_token_ids) == "xend"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_may_be_included(http: FlaskClient, streamed: bool) -> None:
    parameters = {"stop": ["the", "th"], "include_stop_str_in_output": True}
    answer = records(stream(http, **parameters))[-1] if streamed else None
    answer = answer or invoke(http, **parameters).get_json()
    assert answer["generated_text"] == "Hi th"


def test_parameters_without_effect_give_a_warning(
    http: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    response = invoke(http, use_cache=True, length_penalty=2.0, n=1, watermark=False)
    assert response.status_code == 200
    warnings = response.headers["X-Longshore-Warning"].split("; ")
    assert sorted(warnings) == [
        "parameters.length_penalty has no effect without beam search",
        "parameters.use_cache has no effect here",
    ]
    assert sum("has no effect" in record.getMessage() for record in caplog.records) == 2
    assert "X-Longshore-Warning" not in invoke(http).headers


def test_unsupported_parameters_that_change_the_answer_are_errors(http: FlaskClient) -> None:
    for name, value in (("watermark", True), ("penalty_alpha", 0.6), ("logprobs", 5)):
        response = invoke(http, **{name: value})
        assert (response.status_code, response.get_json()["field"]) == (400, f"parameters.{name}")


def test_prompts_that_are_too_long(http: FlaskClient, engine: FakeEngine) -> None:
    response = invoke(http, "x" * 100)
    assert (response.status_code, response.get_json()["field"]) == (400, "inputs")
    response = invoke(http, "x" * 95, max_new_tokens=6)
    error = response.get_json()
    assert (response.status_code, error["field"]) == (400, "parameters.max_new_tokens")
    assert "inputs has 95 of them, so 6 is more than the 5 that remain" in error["error"]
    assert invoke(http, "x" * 95, max_new_tokens=5).status_code == 200
    assert len(engine.of_type(Submit)) == 1


def test_long_prompts_are_tokenized_in_a_thread(http: FlaskClient, engine: FakeEngine) -> None:
    text = "x" * 90
    answers = invoke(http, [text] * (LONG_TEXT_CHARACTERS // len(text) + 1), max_new_tokens=1)
    assert all("generated_text" in answer for answer in answers.get_json())
    assert {len(submit.prompt_token_ids) for submit in engine.of_type(Submit)} == {90}


def test_text_that_cannot_fit_is_not_tokenized(http: FlaskClient) -> None:
    """The context has 100 tokens, and the longest token of the vocabulary has 5 characters. So a
    text of 501 characters cannot fit."""
    for fields in ({}, {"truncate": 10}):
        response = invoke(http, "x" * 501, **fields)
        assert response.status_code == 400
        assert response.get_json()["error"].endswith("501 characters does not fit")
    answers = invoke(http, ["x" * 501, "x"], max_new_tokens=1).get_json()
    assert answers[0]["field"] == "inputs[0]"
    assert "generated_text" in answers[1]


def test_errors_name_their_field(http: FlaskClient, engine: FakeEngine) -> None:
    response = invoke(http, temprature=1)
    assert response.status_code == 400
    assert response.get_json() == {
        "error": "parameters.temprature: no such field; did you mean 'temperature'?",
        "code": 400,
        "field": "parameters.temprature",
    }
    assert not engine.of_type(Submit)
