"""Several models behind one application; the models are real processes that echo requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from flask.testing import FlaskClient

from tests.container.conftest import eventually
from tests.container.multi_model.fronts import TARGET, MakeModel, ServeModels, load, names


def test_load_list_invoke_and_unload(front: FlaskClient, model_dir: MakeModel) -> None:
    url = model_dir("a")
    assert front.get("/ping").status_code == 200
    assert front.get("/models").get_json() == {"models": []}
    load(front, "a", url)
    entry = {"modelName": "a", "modelUrl": url, "status": "READY"}
    assert front.get("/models").get_json() == {"models": [entry]}
    (described,) = front.get("/models/a").get_json()
    assert described.items() >= entry.items()
    (model,) = described["models"]
    assert len(model["workerGroups"][0]["workers"]) == 1
    echoed = front.post("/models/a/invoke", data=b"{}", headers={TARGET: "a.tar.gz"})
    assert (echoed.status_code, echoed.get_json(force=True)["name"]) == (201, "a")
    assert front.delete("/models/a").status_code == 200
    assert front.get("/models").get_json() == {"models": []}
    for response in (front.post("/models/a/invoke"), front.delete("/models/a")):
        assert response.status_code == 404
        assert "loaded: none" in response.get_json()["error"]
    load(front, "a", f"file://{url}")


def test_requests_and_responses_are_passed_on_unchanged(
    front: FlaskClient, model_dir: MakeModel
) -> None:
    load(front, "a", model_dir("a"))
    response = front.post(
        "/models/a/adapters/b%20c?x=1&y=%2F",
        data=b"\xff\x00body",
        headers={
            "X-Amzn-SageMaker-Session-Id": "s",
            "Content-Type": "image/png",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "tracestate": "vendor=1",
        },
    )
    echoed = response.get_json(force=True)
    assert echoed["path"] == "/adapters/b%20c?x=1&y=%2F"
    assert echoed["body"] == "\xff\x00body"
    assert echoed["headers"]["x-amzn-sagemaker-session-id"] == "s"
    assert echoed["headers"]["content-type"] == "image/png"
    assert echoed["headers"]["traceparent"].endswith("-b7ad6b7169203331-01")
    assert echoed["headers"]["tracestate"] == "vendor=1"
    assert echoed["headers"]["content-length"] == "6"
    assert (response.headers["X-Own"], response.headers["X-Request-Id"]) == ("kept", "own-id")
    assert "Content-Type" not in response.headers, "the model sent none"
    assert "Connection" not in response.headers


def test_choosing_the_model(front: FlaskClient, model_dir: MakeModel) -> None:
    """A request names a model by its path or a header, or gets the only one that is loaded."""

    def echoed(path: str, **headers: str) -> tuple[str, str]:
        answer = front.post(path, headers=headers).get_json(force=True)
        return answer["name"], answer["path"]

    nobody = front.post("/invocations")
    assert nobody.status_code == 400
    assert "loaded: none" in nobody.get_json()["error"]
    load(front, "a", model_dir("a"))
    assert echoed("/invocations") == ("a", "/invocations")
    load(front, "b", model_dir("b"))
    several = front.post("/invocations")
    assert several.status_code == 400
    assert "loaded: a, b" in several.get_json()["error"]
    assert echoed("/predictions/b") == ("b", "/invocations")
    by_header = {TARGET: "b"}
    for path in (
        "/invocations",
        "/endpoints/any/invocations-response-stream",
        "/v1/chat/completions",
        "/openai/v1/chat/completions",
        "/v2/rerank",
        "/rerank",
        "/score",
        "/embed",
        "/embed_sparse",
        "/predict",
        "/tokenize",
        "/generate",
        "/generate_stream",
        "/info",
        "/load",
        "/version",
    ):
        assert echoed(path, **by_header) == ("b", path)
    assert echoed("/models/a/v1/chat/completions", **by_header) == ("a", "/v1/chat/completions")
    assert front.post("/invocations", headers={TARGET: "c"}).status_code == 404
    assert front.get("/elsewhere").status_code == 404


def test_pages_of_another_origin_may_call_every_model(
    serve_models: ServeModels, model_dir: MakeModel
) -> None:
    origin = "https://example.com"
    http = serve_models(SERVING_CORS_ALLOWED_ORIGIN=origin)
    load(http, "a", model_dir("a"))
    for response in (http.get("/models"), http.post("/invocations"), http.get("/elsewhere")):
        assert response.headers.getlist("Access-Control-Allow-Origin") == [origin]
    asked = http.options("/v1/chat/completions", headers={"Access-Control-Request-Headers": "x"})
    assert asked.status_code == 200
    assert "POST" in asked.headers["Access-Control-Allow-Methods"]
    assert asked.headers["Access-Control-Allow-Headers"] == "x"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b'{"url": "/x"}', "model_name"),
        (b'{"model_name": "a"}', "url"),
        (b'{"model_name": 5, "url": "/x"}', "model_name"),
        (b'{"model_name": "a/b", "url": "/x"}', "model_name"),
        (b'{"model_name": "../a", "url": "/x"}', "model_name"),
        (b'{"model_name": "a", "url": "/there/is/none"}', "url"),
        (b'{"model_name": "a", "url": "."}', "url"),
        (b'{"model_name": "a", "url": "s3://bucket/model"}', "url"),
        (b'{"model_name": "a", "url": "/%s"}' % (b"x" * 300), "url"),
        (b'{"model_name": "a", "url": "/\\u0000"}', "url"),
    ],
)
def test_invalid_model_choices(front: FlaskClient, body: bytes, field: str) -> None:
    response = front.post("/models", data=body)
    assert (response.status_code, response.get_json()["field"]) == (400, field)
    assert names(front) == []


def test_a_body_of_more_than_64_kib_is_refused(front: FlaskClient) -> None:
    response = front.post("/models", data=b"x" * 2**17)
    assert response.status_code == 413
    assert response.get_json()["error"] == "the body exceeds the limit of 65536 bytes"


def test_a_crash_fails_each_request_once_and_affects_no_other_model(
    front: FlaskClient, model_dir: MakeModel
) -> None:
    load(front, "a", model_dir("a"))
    load(front, "b", model_dir("b"))
    streaming = front.post("/models/a/stream", buffered=False)
    lines = iter(streaming.response)
    assert next(lines) == b"first\n"
    lost = front.post("/models/a/crash")
    assert lost.status_code == 503
    assert "has ended" in lost.get_json()["error"]
    with pytest.raises(ConnectionResetError):
        next(lines)
    streaming.close()
    eventually(lambda: front.get("/models/a").get_json()[0]["status"] == "FAILED")
    after = front.post("/models/a/invoke")
    assert after.status_code == 503
    assert "has ended" in after.get_json()["error"]
    assert front.post("/models/b/invoke").status_code == 201
    load(front, "a", str(Path(model_dir("x")).parents[1] / "a" / "model"))
    assert front.post("/models/a/invoke").status_code == 201


def test_a_truncated_response_is_not_passed_on_as_complete(
    front: FlaskClient, model_dir: MakeModel
) -> None:
    load(front, "a", model_dir("a"))
    response = front.post("/models/a/cut", buffered=False)
    with pytest.raises(ConnectionResetError):
        list(response.response)
    response.close()


def test_a_response_before_the_body_was_read(front: FlaskClient, model_dir: MakeModel) -> None:
    load(front, "a", model_dir("a"))
    assert front.post("/models/a/early", data=bytes(2**24)).status_code == 413


def test_metrics_of_all_models_are_merged(front: FlaskClient, model_dir: MakeModel) -> None:
    for name in ("a", "b"):
        load(front, name, model_dir(name))
    response = front.get("/metrics")
    lines = response.get_data(as_text=True).splitlines()
    assert response.mimetype == "text/plain"
    for name in ("a", "b"):
        assert lines.count(f'vllm:num_requests_running{{model_name="{name}"}} 1.0') == 1
        assert lines.count(f'vllm:prompt_tokens_total{{model_name="{name}"}} 5.0') == 1
    assert sum(line.startswith("# TYPE vllm:num_requests_running") for line in lines) == 1
