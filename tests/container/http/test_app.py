"""Behaviour common to all routes: health, content types, model names and request ids."""

from __future__ import annotations

from flask.testing import FlaskClient

from core.protocol.messages import Submit
from tests.container.fake_engine import FakeEngine


def test_ping_reports_health(http: FlaskClient) -> None:
    for response in (http.get("/ping"), http.post("/ping")):
        assert response.status_code == 200
        assert response.get_json() == {"status": "healthy"}
        assert response.headers["X-Request-Id"]


def test_content_types(http: FlaskClient) -> None:
    body = b'{"inputs": "Q"}'
    for kind in ("application/json", "application/json; charset=utf-8", "", "text/plain"):
        assert http.post("/invocations", data=body, content_type=kind).status_code == 200
    curl = http.post("/invocations", data=body, content_type="application/x-www-form-urlencoded")
    assert curl.status_code == 200
    response = http.post("/invocations", data=body, content_type="image/png")
    assert (response.status_code, response.get_json()["code"]) == (415, 415)


def test_predictions_check_the_model_name(http: FlaskClient) -> None:
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
