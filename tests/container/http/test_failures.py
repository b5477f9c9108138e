"""Errors as clients see them, before and after the first token."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient

from container.apis.anthropic.response import anthropic_error
from container.apis.openai import openai_error
from container.front_end.app import create_app
from container.http.failures import Failure
from container.http.off_loop import LONG_TEXT_CHARACTERS
from container.wire.engine_client import EngineClient
from core.configuration.options import Options, make_options
from core.protocol.messages import Abort
from core.text.tokenizer import Tokenizer
from tests.container.conftest import eventually
from tests.container.fake_engine import FakeEngine, fails, says, stalls
from tests.container.invocations import invoke, records, stream
from tests.escaping import ESCAPING


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
def test_early_failures_have_an_error_status(
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


@pytest.mark.parametrize(
    ("code", "is_client_error"), [(400, True), (424, False), (431, True), (500, False)]
)
def test_the_formats_agree_on_who_is_at_fault(code: int, is_client_error: bool) -> None:
    failure = Failure(code, "no luck")
    for body in (openai_error(failure), anthropic_error(failure)):
        error: Any = body["error"]
        assert (error["type"] == "invalid_request_error") == is_client_error


def test_a_late_failure_ends_the_stream_with_an_error_record(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.script = fails("failed", "no luck", after=[65, 66])
    response = stream(http)
    assert response.status_code == 200
    last = records(response)[-1]
    assert last["token"] == {
        "id": -1,
        "text": "",
        "logprob": -1,
        "special_token": True,
        "error_msg": "no luck",
    }
    assert last["generated_text"] == ""
    assert last["details"]["finish_reason"] == "error"
    assert last["details"]["generated_tokens"] == 2


def test_a_late_failure_without_streaming_has_an_error_status(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.script = fails("failed", "no luck", after=[65])
    response = invoke(http)
    assert response.status_code == 424
    assert response.get_json() == {"error": "no luck", "code": 424}


def test_request_timeout(client: EngineClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    http = create_app(client, tokenizer, make_options({"predict_timeout": 1}), "demo").test_client()
    engine.script = stalls(after=[65])
    last = records(stream(http))[-1]
    assert last["token"]["error_msg"] == "not finished within 1 s (option.predict_timeout)"
    eventually(lambda: engine.of_type(Abort))
    assert [abort.reason for abort in engine.of_type(Abort)] == ["timeout"]


def test_an_unread_stream_is_aborted(http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = stalls(after=[65])
    response = stream(http)
    response.close()
    eventually(lambda: engine.of_type(Abort))
    assert [abort.reason for abort in engine.of_type(Abort)] == ["disconnect"]


def test_a_request_waits_for_an_engine_that_is_about_to_be_ready(
    endpoint: str, tokenizer: Tokenizer
) -> None:
    """The worker that has the request may connect to the engine late, after another worker has
    already answered /ping with 200.
    """
    client = EngineClient(endpoint, heartbeat_timeout_s=60)
    http = create_app(client, tokenizer, Options(), "demo").test_client()
    assert http.get("/ping").status_code == 503
    asking = gevent.spawn(invoke, http)
    gevent.sleep(0.05)
    assert not asking.ready()
    engine = FakeEngine(endpoint, says([65]))
    assert asking.get(timeout=60).status_code == 200
    client.close()
    engine.close()


def test_engine_not_ready(endpoint: str, tokenizer: Tokenizer) -> None:
    client = EngineClient(endpoint, heartbeat_timeout_s=60)
    http = create_app(client, tokenizer, Options(), "demo").test_client()
    for response in (http.get("/ping"), invoke(http)):
        assert response.status_code == 503
        assert response.get_json() == {"error": "the engine is starting", "code": 503}
    client.close()


def test_http_errors_are_json(
    http: FlaskClient, client: EngineClient, tokenizer: Tokenizer
) -> None:
    assert http.get("/nowhere").get_json()["code"] == 404
    wrong_method = http.get("/invocations")
    assert wrong_method.get_json()["code"] == 405
    assert "POST" in wrong_method.headers["Allow"]
    small = create_app(
        client, tokenizer, make_options({"max_request_size": 10}), "demo"
    ).test_client()
    assert invoke(small).get_json() == {
        "error": "the body exceeds the limit of 10 bytes; max_request_size sets it",
        "code": 413,
    }
    chunked = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    body = BytesIO(b'{"inputs":"too long for this"}')
    response = small.post("/invocations", input_stream=body, environ_overrides=chunked)
    assert response.get_json()["code"] == 413


def test_an_unexpected_exception_is_a_500(
    http: FlaskClient, engine: FakeEngine, monkeypatch: Any
) -> None:
    def accident(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("container.apis.text.api.read_text_request", accident)
    assert invoke(http).get_json() == {"error": "internal error", "code": 500}


class Panics:
    """A tokenizer's library that panics at a given call, and else works."""

    def __init__(self, library: Any, method: str, kind: type[BaseException]) -> None:
        self._library, self._method, self._kind = library, method, kind

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._method else getattr(self._library, name)

    def _fail(self, *arguments: object, **keywords: object) -> None:
        raise self._kind("why")


@pytest.mark.parametrize("kind", ESCAPING)
@pytest.mark.parametrize("size", [1, LONG_TEXT_CHARACTERS // 90 + 1])
def test_a_panic_of_the_tokenizer_fails_only_its_request(
    http: FlaskClient,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
    size: int,
) -> None:
    """A long prompt is tokenized in a thread."""
    library = tokenizer._tokenizer  # pyright: ignore[reportPrivateUsage]
    panics = Panics(library, "encode_batch_fast", kind)
    monkeypatch.setattr(tokenizer, "_tokenizer", panics)
    body = {"inputs": ["x" * 90] * size, "parameters": {"max_new_tokens": 1}}
    assert http.post("/invocations", json=body).status_code == 500
    monkeypatch.setattr(tokenizer, "_tokenizer", library)
    assert http.post("/invocations", json=body).status_code == 200


@pytest.mark.parametrize("kind", ESCAPING)
def test_a_panic_of_the_tokenizer_within_a_stream_ends_it_with_a_record(
    http: FlaskClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine,
    kind: type[BaseException],
) -> None:  # fmt: skip
    engine.script = says([65, *tokenizer.encode("é") * 4])
    response = stream(http)
    library = tokenizer._tokenizer  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(tokenizer, "_tokenizer", Panics(library, "decode", kind))
    assert response.status_code == 200
    assert records(response)[-1]["token"]["error_msg"] == "internal error"
