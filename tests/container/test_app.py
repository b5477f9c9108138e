"""The HTTP surface over a scripted engine: shapes, statuses, texts."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from container.app import create_app
from container.engine_client import EngineClient
from container.prompting import LONG_TEXT_CHARACTERS
from core.messages import Abort, Submit
from core.options import Options
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS, eventually
from tests.container.fake_engine import FakeEngine, fails, says, stalls


def invoke(http: FlaskClient, inputs: str = "Q", **parameters: object) -> TestResponse:
    return http.post("/invocations", json={"inputs": inputs, "parameters": parameters})


def stream(http: FlaskClient, accept: str = "", **parameters: object) -> TestResponse:
    headers = {"Accept": accept} if accept else {}
    body = {"inputs": "Q", "parameters": parameters, "stream": True}
    return http.post("/invocations", json=body, headers=headers)


def records(response: TestResponse) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.get_data().splitlines()]


@pytest.fixture
def reply(engine: FakeEngine, tokenizer: Tokenizer) -> Any:
    """Has the engine answer with this text, whatever it is asked."""

    def set_reply(text: str, **options: int) -> None:
        engine.script = says([*tokenizer.encode(text), EOS], **options)

    return set_reply


def test_ping(http: FlaskClient) -> None:
    for response in (http.get("/ping"), http.post("/ping")):
        assert response.status_code == 200
        assert response.get_json() == {"status": "healthy"}
        assert response.headers["X-Request-Id"]


def test_answer(http: FlaskClient) -> None:
    response = invoke(http)
    assert response.status_code == 200
    assert response.mimetype == "application/json"
    assert response.get_json() == {"generated_text": "Hi there"}


def test_details(http: FlaskClient) -> None:
    answer = invoke(http, details=True, max_new_tokens=2).get_json()
    assert answer["generated_text"] == "Hi"
    details = answer["details"]
    assert details["finish_reason"] == "length"
    assert (details["generated_tokens"], details["inputs"]) == (2, "Q")
    assert [token["text"] for token in details["tokens"]] == ["H", "i"]
    assert [token["log_prob"] for token in details["tokens"]] == [-0.5, -0.5]


def test_end_of_sequence_is_a_token_without_text(http: FlaskClient) -> None:
    details = invoke(http, details=True).get_json()["details"]
    assert details["finish_reason"] == "eos_token"
    assert details["tokens"][-1] == {"id": EOS, "text": "", "log_prob": -0.5}
    shown = invoke(http, skip_special_tokens=False).get_json()
    assert shown == {"generated_text": "Hi there<eos>"}


def test_full_text(http: FlaskClient) -> None:
    assert invoke(http, return_full_text=True).get_json() == {"generated_text": "QHi there"}
    assert records(stream(http, return_full_text=True))[-1]["generated_text"] == "QHi there"


def test_stream_of_lines(http: FlaskClient) -> None:
    response = stream(http, max_new_tokens=2, details=True)
    assert response.mimetype == "application/jsonlines"
    first, last = records(response)
    assert first["token"]["text"] == "H"
    assert set(first) == {"token"}
    assert last["token"]["text"] == "i"
    assert last["generated_text"] == "Hi"
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 2, "inputs": "Q"}
    assert response.get_data().endswith(b"\n")


def test_stream_without_details(http: FlaskClient) -> None:
    assert "details" not in records(stream(http))[-1]


def test_stream_of_events(http: FlaskClient) -> None:
    response = stream(http, accept="text/event-stream", max_new_tokens=1)
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
def test_form_of_a_stream(
    client: EngineClient, tokenizer: Tokenizer, formatter: Any, accept: str, mimetype: str
) -> None:
    http = create_app(client, tokenizer, Options(output_formatter=formatter), "demo").test_client()
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
    assert not any("\ufffd" in each for each in texts)


def test_a_character_cut_at_the_end_is_shown_as_such(http: FlaskClient, reply: Any) -> None:
    reply("a\U0001f642")
    assert invoke(http, max_new_tokens=3).get_json() == {"generated_text": "a\ufffd"}
    assert records(stream(http, max_new_tokens=3))[-1]["generated_text"] == "a\ufffd"


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("streamed", [False, True])
def test_stop_texts(
    http: FlaskClient, reply: Any, engine: FakeEngine, per_step: int, streamed: bool
) -> None:
    reply("Hello there, \u00e9nd of it", per_step=per_step)
    parameters = {"stop_sequences": ["nothing", ", \u00e9n"], "details": True}
    answer = records(stream(http, **parameters))[-1] if streamed else None
    answer = answer or invoke(http, **parameters).get_json()
    assert answer["generated_text"] == "Hello there"
    assert answer["details"]["finish_reason"] == "stop_sequence"


def test_a_stop_text_ends_the_work(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = stalls(after=tokenizer.encode("cab"))
    assert invoke(http, stop=["ab"]).get_json() == {"generated_text": "c"}
    eventually(lambda: engine.of_type(Abort))


def test_what_the_engine_is_asked(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    invoke(http, "Hello", temperature=0.5, seed=3, max_new_tokens=9)
    (submit,) = engine.of_type(Submit)
    assert isinstance(submit, Submit)
    assert submit.prompt_token_ids == tokenizer.encode("Hello")
    assert (submit.params.temperature, submit.params.seed, submit.params.max_tokens) == (0.5, 3, 9)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("kind", "field", "status", "named"),
    [
        ("overloaded", "", 503, None),
        ("failed", "", 424, None),
        ("rejected", "prompt", 400, "inputs"),
        ("rejected", "max_tokens", 400, "parameters.max_new_tokens"),
        ("rejected", "top_p", 400, "parameters.top_p"),
    ],
)
def test_early_failures_have_a_status(
    http: FlaskClient,
    engine: FakeEngine,
    kind: str,
    field: str,
    status: int,
    named: str | None,
    streamed: bool,
) -> None:
    engine.script = fails(kind, "no luck", field)
    response = stream(http) if streamed else invoke(http)
    assert response.status_code == status
    body = response.get_json()
    assert "no luck" in body["error"]
    assert (body["code"], body.get("field")) == (status, named)
    assert ("Retry-After" in response.headers) == (status == 503)


def test_a_late_failure_ends_the_stream_with_an_error(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.script = fails("failed", "no luck", after=[65, 66])
    response = stream(http)
    assert response.status_code == 200
    last = records(response)[-1]
    assert last["token"] == {
        "id": -1,
        "text": "",
        "log_prob": -1,
        "special_token": True,
        "error_msg": "no luck",
    }
    assert last["generated_text"] == ""
    assert last["details"]["finish_reason"] == "error"
    assert last["details"]["generated_tokens"] == 2


def test_a_late_failure_without_a_stream_has_a_status(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.script = fails("failed", "no luck", after=[65])
    response = invoke(http)
    assert response.status_code == 424
    assert response.get_json() == {"error": "no luck", "code": 424}


def test_too_late(client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    http = create_app(client, tokenizer, Options(predict_timeout=1), "demo").test_client()
    engine.script = stalls(after=[65])
    last = records(stream(http))[-1]
    assert last["token"]["error_msg"] == "not finished within 1 s (option.predict_timeout)"
    eventually(lambda: engine.of_type(Abort))


def test_an_unread_stream_is_aborted(http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = stalls(after=[65])
    response = stream(http)
    response.close()
    eventually(lambda: engine.of_type(Abort))


def test_a_batch(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """Each input has a result of its own, and mistakes disturb no neighbour."""

    def script(submit: Submit) -> Any:
        text = tokenizer.decode(submit.prompt_token_ids)
        return fails("failed", "no luck", after=[65])(submit) if text == "bad" else (
            says([*submit.prompt_token_ids, EOS])(submit)
        )  # fmt: skip

    engine.script = script
    inputs = ["one", "bad", "", "two", 5, "x" * 99]
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 5, "return_full_text": True}}
    whole = http.post("/invocations", json=body)
    assert whole.status_code == 200
    results = whole.get_json()
    assert [each.get("generated_text") for each in results] == [
        "oneone", None, None, "twotwo", None, None,
    ]  # fmt: skip
    assert results[1] == {"error": "no luck", "code": 424}
    assert [each.get("field") for each in results[2:]] == [
        "inputs[2]", None, "inputs[4]", "parameters.max_new_tokens",
    ]  # fmt: skip

    seen = records(http.post("/invocations", json={**body, "stream": True}))
    texts = {each["index"]: each["generated_text"] for each in seen if "generated_text" in each}
    assert texts == {0: "oneone", 1: "", 3: "twotwo"}
    assert {each["index"] for each in seen if "error" in each} == {2, 4, 5}


def test_a_batch_without_any_answer_has_the_status_of_its_first(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.script = fails("overloaded", "full")
    response = http.post("/invocations", json={"inputs": ["a", "b"]})
    assert (response.status_code, response.get_json()["error"]) == (503, "full")


def test_a_batch_that_is_not_read_is_aborted(http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = stalls(after=[65])
    response = http.post("/invocations", json={"inputs": ["a", "b", "c"], "stream": True})
    response.close()
    eventually(lambda: len(engine.of_type(Abort)) == 3)


def test_csv_is_a_batch(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    data = 'inputs\nfirst\n"a ""b"", c"\n'
    response = http.post("/invocations", data=data, content_type="text/csv")
    assert response.get_json() == [{"generated_text": "Hi there"}] * 2
    prompts = [each.prompt_token_ids for each in engine.of_type(Submit) if isinstance(each, Submit)]
    assert list(map(tokenizer.decode, prompts)) == ["first", 'a "b", c']


def test_truncate(http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    invoke(http, "x" * 200 + "end", truncate=4)
    (submit,) = engine.of_type(Submit)
    assert isinstance(submit, Submit)
    assert tokenizer.decode(submit.prompt_token_ids) == "xend"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_text_may_stay(http: FlaskClient, streamed: bool) -> None:
    parameters = {"stop": ["the", "th"], "include_stop_str_in_output": True}
    answer = records(stream(http, **parameters))[-1] if streamed else None
    answer = answer or invoke(http, **parameters).get_json()
    assert answer["generated_text"] == "Hi th"


def test_what_means_nothing_here_is_a_warning(
    http: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    response = invoke(http, use_cache=True, length_penalty=2, n=1, watermark=False)
    assert response.status_code == 200
    warnings = response.headers["X-Longshore-Warning"].split("; ")
    assert sorted(warnings) == [
        "parameters.length_penalty has no effect here",
        "parameters.use_cache has no effect here",
    ]
    assert sum("has no effect here" in each.getMessage() for each in caplog.records) == 2
    assert "X-Longshore-Warning" not in invoke(http).headers


def test_what_would_change_an_answer_is_not_passed_over(http: FlaskClient) -> None:
    for name, value in (("n", 2), ("watermark", True), ("top_n_tokens", 3)):
        response = invoke(http, **{name: value})
        assert (response.status_code, response.get_json()["field"]) == (400, f"parameters.{name}")


def test_too_long(http: FlaskClient, engine: FakeEngine) -> None:
    response = invoke(http, "x" * 100)
    assert (response.status_code, response.get_json()["field"]) == (400, "inputs")
    response = invoke(http, "x" * 95, max_new_tokens=6)
    error = response.get_json()
    assert (response.status_code, error["field"]) == (400, "parameters.max_new_tokens")
    assert "6 is more than the 5 that are left: inputs has 95 tokens" in error["error"]
    assert invoke(http, "x" * 95, max_new_tokens=5).status_code == 200
    assert len(engine.of_type(Submit)) == 1


def test_a_long_prompt_is_tokenized_in_a_thread(http: FlaskClient) -> None:
    response = invoke(http, "x" * (LONG_TEXT_CHARACTERS + 1))
    assert response.get_json()["error"].startswith(f"inputs: {LONG_TEXT_CHARACTERS + 1} tokens")


def test_not_ready(endpoint: str, tokenizer: Tokenizer) -> None:
    client = EngineClient(endpoint, heartbeat_timeout_s=60)
    http = create_app(client, tokenizer, Options(), "demo").test_client()
    for response in (http.get("/ping"), invoke(http)):
        assert response.status_code == 503
        assert response.get_json() == {"error": "the engine is starting", "code": 503}
    client.close()


def test_types(http: FlaskClient) -> None:
    body = b'{"inputs": "Q"}'
    for kind in ("application/json", "application/json; charset=utf-8", "", "text/plain"):
        assert http.post("/invocations", data=body, content_type=kind).status_code == 200
    curl = http.post("/invocations", data=body, content_type="application/x-www-form-urlencoded")
    assert curl.status_code == 200
    response = http.post("/invocations", data=body, content_type="image/png")
    assert (response.status_code, response.get_json()["code"]) == (415, 415)


def test_http_errors_are_json(
    http: FlaskClient, client: EngineClient, tokenizer: Tokenizer
) -> None:
    assert http.get("/nowhere").get_json()["code"] == 404
    wrong_method = http.get("/invocations")
    assert wrong_method.get_json()["code"] == 405
    assert "POST" in wrong_method.headers["Allow"]
    small = create_app(client, tokenizer, Options(max_request_size=10), "demo").test_client()
    assert invoke(small).get_json()["code"] == 413
    chunked = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    body = BytesIO(b'{"inputs":"too long for this"}')
    response = small.post("/invocations", input_stream=body, environ_overrides=chunked)
    assert response.get_json()["code"] == 413


def test_a_mistake_names_its_field(http: FlaskClient, engine: FakeEngine) -> None:
    response = invoke(http, temprature=1)
    assert response.status_code == 400
    assert response.get_json() == {
        "error": "parameters.temprature: no such field; did you mean 'temperature'?",
        "code": 400,
        "field": "parameters.temprature",
    }
    assert not engine.of_type(Submit)


def test_an_accident_is_500(http: FlaskClient, engine: FakeEngine, monkeypatch: Any) -> None:
    def accident(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("container.routes.text.read_text_request", accident)
    assert invoke(http).get_json() == {"error": "internal error", "code": 500}


def test_predictions_know_their_model(http: FlaskClient) -> None:
    assert http.post("/predictions/demo", json={"inputs": "Q"}).status_code == 200
    assert "serves 'demo'" in http.post("/predictions/other", json={}).get_json()["error"]


def test_request_ids(http: FlaskClient, engine: FakeEngine) -> None:
    headers = {"X-Amzn-SageMaker-Inference-Id": "mine"}
    for _ in range(2):
        response = http.post("/invocations", json={"inputs": "Q"}, headers=headers)
        assert response.headers["X-Request-Id"] == "mine"
    ids = [submit.id for submit in engine.of_type(Submit) if isinstance(submit, Submit)]
    assert len(set(ids)) == 2
    odd = http.get("/ping", headers={"X-Amzn-SageMaker-Inference-Id": "two words"})
    assert odd.headers["X-Request-Id"] != "two words"
