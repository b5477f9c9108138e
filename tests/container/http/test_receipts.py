"""Receipts in answers, on request, and in the log line of a request."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient

from core.output import Output
from core.protocol.messages import Abort, Step, Submit
from core.protocol.stats import Receipt
from core.sampling import Finish
from core.text.tokenizer import Tokenizer
from tests.container.conftest import Serve, eventually
from tests.container.fake_engine import FakeEngine

EXPECTED = {
    "compute_ns": 7, "queued_ns": {"slots": 5}, "kv_block_ns": 30, "kv_shared_block_ns": 10,
    "num_preemptions": 1, "num_cached_tokens": 16,
}  # fmt: skip


def receipt() -> Receipt:
    return Receipt(7, {"slots": 5}, 30, 10, 1, 16)


@pytest.fixture
def charging(engine: FakeEngine) -> None:
    """Let the engine charge for every request."""

    def script(submit: Submit) -> Any:
        yield Step([(submit.id, Output(0, (65,), (-0.5,)))])
        yield Step([(submit.id, Output(0, (66,), (-0.5,), Finish.LENGTH, receipt=receipt()))])

    engine.script = script


@pytest.mark.usefixtures("charging")
@pytest.mark.parametrize("stream", [False, True])
def test_details_have_it_on_request(http: FlaskClient, stream: bool) -> None:
    def details(**parameters: bool) -> dict[str, Any]:
        body = {"inputs": "Q", "parameters": {"details": True, **parameters}, "stream": stream}
        last = http.post("/invocations", json=body).get_data().splitlines()[-1]
        return json.loads(last)["details"]

    assert details(receipt=True)["receipt"] == EXPECTED
    assert "receipt" not in details()


@pytest.mark.usefixtures("charging")
def test_usage_has_it_on_request(http: FlaskClient) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Q"}]}
    for path, field in (("chat/completions", body), ("completions", {"prompt": "Q"})):
        usage = http.post(f"/v1/{path}", json={**field, "receipt": True}).get_json()["usage"]
        assert usage["receipt"] == EXPECTED
        assert "receipt" not in http.post(f"/v1/{path}", json=field).get_json()["usage"]


@pytest.mark.usefixtures("charging")
def test_several_prompts_have_their_sum(http: FlaskClient) -> None:
    body = {"prompt": ["Q", "R"], "receipt": True}
    usage = http.post("/v1/completions", json=body).get_json()["usage"]
    assert usage["receipt"] == {
        "compute_ns": 14, "queued_ns": {"slots": 10}, "kv_block_ns": 60, "kv_shared_block_ns": 20,
        "num_preemptions": 2, "num_cached_tokens": 32,
    }  # fmt: skip


@pytest.mark.usefixtures("charging")
def test_a_stream_ends_with_it(http: FlaskClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "Q"}], "stream": True, "receipt": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    lines = http.post("/v1/chat/completions", json=body).get_data(as_text=True).split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "usage" in line]
    assert chunks[-1]["usage"]["receipt"] == EXPECTED


@pytest.fixture
def stopped(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """Let the engine send tokens until it is told to stop, and then a receipt."""

    def script(submit: Submit) -> Any:
        for token_id in tokenizer.encode("AB"):
            yield Step([(submit.id, Output(0, (token_id,), (-0.5,)))])

    engine.script = script
    engine.facts = msgspec.structs.replace(engine.facts, gives_receipts=True)
    engine.receipt = receipt()


@pytest.mark.usefixtures("stopped")
def test_an_answer_that_a_stop_string_ends_has_it(http: FlaskClient, engine: FakeEngine) -> None:
    body = {"prompt": "Q", "stop": "B", "receipt": True}
    answer = http.post("/v1/completions", json=body).get_json()
    assert answer["usage"]["receipt"] == EXPECTED
    assert answer["choices"][0]["text"] == "A"


@pytest.mark.usefixtures("stopped")
def test_an_engine_that_does_not_say_so_in_time_delays_no_answer(
    http: FlaskClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("container.apis.generation.generation.RECEIPT_WAIT_S", 0.1)
    engine.receipt = None
    answer = http.post("/v1/completions", json={"prompt": "Q", "stop": "B", "receipt": True})
    assert answer.get_json()["usage"]["receipt"] is None
    eventually(lambda: len(engine.of_type(Abort)) == 2)


def test_an_engine_without_receipts_has_none(http: FlaskClient) -> None:
    body = {"inputs": "Q", "parameters": {"details": True, "receipt": True}}
    assert http.post("/invocations", json=body).get_json()["details"]["receipt"] is None


@pytest.mark.usefixtures("charging")
def test_the_log_has_the_costs(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    http = serve(log_requests="true")
    with caplog.at_level(logging.INFO):
        http.post("/invocations", json={"inputs": "Q"}).close()
    assert "compute_s=7e-09 kv_block_s=3e-08" in caplog.text
