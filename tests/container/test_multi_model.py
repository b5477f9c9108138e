"""Several models behind one application; the models are real processes that echo requests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient
from gevent.event import Event

from container.multi_model.app import create_front
from container.multi_model.model_container import ModelContainer
from container.multi_model.models import Models
from container.security.source_roots import SourceRoots
from tests.container.conftest import child_processes, eventually

FAKE = (sys.executable, "-m", "tests.container.fake_model")
TARGET = "X-Amzn-SageMaker-Target-Model"

MakeModel = Callable[..., str]
Front = Callable[..., FlaskClient]


@pytest.fixture
def model_dir(tmp_path: Path) -> MakeModel:
    """Create a model directory and return its path."""

    def make(name: str, mode: str = "", **properties: object) -> str:
        path = tmp_path / name / "model"
        path.mkdir(parents=True)
        lines = [f"option.{key}={value}\n" for key, value in properties.items()]
        (path / "serving.properties").write_text("".join(lines))
        if mode:
            (path / "mode").write_text(mode)
        return str(path)

    return make


@pytest.fixture
def serve_models(tmp_path: Path, short_dir: Path) -> Iterator[Front]:
    """A client of the application over fake models, which stop with the test."""
    opened: list[Models] = []

    def serve(*gpus: str, **variables: str) -> FlaskClient:
        models = Models(short_dir, {"PYTHONPATH": ".", **variables}, FAKE, gpus=gpus)
        models.initial_models_loaded = True
        opened.append(models)
        sources, origin = SourceRoots([tmp_path]), variables.get("SERVING_CORS_ALLOWED_ORIGIN")
        return create_front(models, None, sources, origin).test_client()

    yield serve
    haste = Event()
    haste.set()
    for models in opened:
        models.stop(haste)
    assert list(short_dir.iterdir()) == [], "a socket file is left"


@pytest.fixture
def front(serve_models: Front) -> FlaskClient:
    return serve_models()


def load(http: FlaskClient, name: str, url: str, *, status: int = 200) -> dict[str, Any]:
    response = http.post("/models", json={"model_name": name, "url": url})
    assert response.status_code == status, response.get_data()
    return response.get_json()


def names(http: FlaskClient, query: str = "") -> list[str]:
    return [model["modelName"] for model in http.get(f"/models{query}").get_json()["models"]]


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
        headers={"X-Amzn-SageMaker-Session-Id": "s", "Content-Type": "image/png"},
    )
    echoed = response.get_json(force=True)
    assert echoed["path"] == "/adapters/b%20c?x=1&y=%2F"
    assert echoed["body"] == "\xff\x00body"
    assert echoed["headers"]["x-amzn-sagemaker-session-id"] == "s"
    assert echoed["headers"]["content-type"] == "image/png"
    assert echoed["headers"]["content-length"] == "6"
    assert (response.headers["X-Own"], response.headers["X-Request-Id"]) == ("kept", "own-id")
    assert "Content-Type" not in response.headers, "none was given"
    assert "Connection" not in response.headers


def test_choosing_the_model(front: FlaskClient, model_dir: MakeModel) -> None:
    """By the path, by the header, or because only one is loaded."""

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
    serve_models: Front, model_dir: MakeModel
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


def test_an_incomplete_body(front: FlaskClient) -> None:
    assert front.post("/models", data=b"x" * 2**17).status_code == 413


@pytest.mark.parametrize(
    ("mode", "status", "reason"),
    [
        ("refuse", 400, "the model is wrong"),
        ("short", 507, "no memory is left; unload another model"),
        ("killed", 507, "unload another model"),
    ],
)
def test_a_model_that_fails_to_load_affects_no_other(
    front: FlaskClient, model_dir: MakeModel, mode: str, status: int, reason: str
) -> None:
    load(front, "good", model_dir("good"))
    error = load(front, "bad", model_dir("bad", mode), status=status)["error"]
    assert error.startswith("model 'bad' cannot be loaded: ")
    assert reason in error
    assert names(front) == ["good"]
    assert front.post("/models/good/invoke").status_code == 201


def test_an_invalid_configuration_is_reported_before_anything_starts(
    front: FlaskClient, model_dir: MakeModel
) -> None:
    error = load(front, "a", model_dir("a", max_model_length=5), status=400)
    assert "serving.properties:1: unknown key 'option.max_model_length'" in error["error"]
    assert error["field"] == "url"


def test_a_model_larger_than_memory_is_not_started(
    front: FlaskClient, model_dir: MakeModel
) -> None:
    url = model_dir("huge", "refuse", kv_cache_memory_bytes=2**60)
    sizes = {"num_attention_heads": 1, "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    (Path(url) / "config.json").write_text(json.dumps(sizes))
    error = load(front, "huge", url, status=507)["error"]
    assert "needs at least 1,099,511,627,776 MiB" in error


def test_gpu_memory_shares(serve_models: Front, model_dir: MakeModel) -> None:
    """Each model goes to the GPU with most memory left; one that does not fit is rejected until
    another is unloaded."""
    http = serve_models("3", "5", CUDA_VISIBLE_DEVICES="3,5")

    def echoed(name: str) -> tuple[str, str]:
        answer = http.post(f"/models/{name}/invoke").get_json(force=True)
        return answer["gpu"], answer["share"]

    for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.6), ("d", 0.4)):
        load(http, name, model_dir(name, gpu_memory_utilization=share))
    assert echoed("a") == ("3", "0.000000")
    assert echoed("b") == ("5", "0.000000")
    assert echoed("c") == ("5", "0.300000")
    assert echoed("d") == ("3", "0.500000")
    error = load(http, "e", model_dir("e", gpu_memory_utilization=0.2), status=507)["error"]
    assert (
        "0.2 of a GPU's memory (option.gpu_memory_utilization), but other models have 0.9" in error
    )
    assert names(http) == ["a", "b", "c", "d"]
    load(http, "f", model_dir("f", device="cpu"))
    assert echoed("f") == ("3,5", "0.000000"), "takes no share"
    assert http.delete("/models/c").status_code == 200
    load(http, "e", str(Path(model_dir("x")).parents[1] / "e" / "model"))
    assert echoed("e") == ("5", "0.300000")


def test_duplicate_names(front: FlaskClient, model_dir: MakeModel) -> None:
    url = model_dir("a")
    both = [gevent.spawn(front.application.test_client().post, "/models",
                         json={"model_name": "a", "url": url}) for _ in range(2)]  # fmt: skip
    gevent.joinall(both)
    assert sorted(greenlet.value.status_code for greenlet in both) == [200, 409]
    assert "already loaded" in load(front, "a", url, status=409)["error"]


def test_a_model_is_unloaded_while_it_loads(front: FlaskClient, model_dir: MakeModel) -> None:
    before = len(child_processes())
    body = {"model_name": "a", "url": model_dir("a", "never-ready")}
    loading = gevent.spawn(front.application.test_client().post, "/models", json=body)
    waiting = gevent.spawn(
        front.application.test_client().post, "/models", json={**body, "model_name": "b"}
    )
    eventually(lambda: names(front) == ["a", "b"])
    eventually(lambda: len(child_processes()) > before)
    gevent.sleep(0.1)
    assert len(child_processes()) == before + 1, "loads take turns"
    assert front.get("/models/a").get_json()[0]["status"] == "LOADING"
    assert front.post("/models/a/invoke").status_code == 503
    unloading = gevent.spawn(front.application.test_client().delete, "/models/b")
    assert front.delete("/models/a").status_code == 200
    for greenlet in (loading, waiting):
        greenlet.join()
        assert greenlet.value.status_code == 409
        assert "was unloaded while it was loading" in greenlet.value.get_json()["error"]
    unloading.join()
    assert unloading.value.status_code == 200
    assert names(front) == []


def test_running_requests_may_finish_when_their_model_is_unloaded(
    front: FlaskClient, model_dir: MakeModel
) -> None:
    url = model_dir("a")
    load(front, "a", url)
    response = front.post("/models/a/stream", buffered=False)
    lines = iter(response.response)
    assert next(lines) == b"first\n"
    unloading = gevent.spawn(front.application.test_client().delete, "/models/a")
    eventually(lambda: front.get("/models/a").get_json()[0]["status"] == "UNLOADING")
    late = front.post("/models/a/invoke")
    assert (late.status_code, "being unloaded" in late.get_json()["error"]) == (404, True)
    assert load(front, "a", url, status=409)["field"] == "model_name"
    assert not unloading.dead
    (Path(url) / "end").write_text("last\n")
    assert list(lines) == [b"last\n"]
    response.close()
    unloading.join()
    assert unloading.value.status_code == 200


def test_a_model_that_does_not_stop_is_killed(
    front: FlaskClient, model_dir: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("container.multi_model.models.STOP_S", 0.1)
    load(front, "a", model_dir("a", "stays"))
    assert front.delete("/models/a").status_code == 200


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


def test_listing_is_paged(front: FlaskClient, model_dir: MakeModel) -> None:
    for name in ("b", "c", "a"):
        load(front, name, model_dir(name))
    first = front.get("/models?limit=2").get_json()
    assert [model["modelName"] for model in first["models"]] == ["a", "b"]
    assert front.delete("/models/b").status_code == 200
    assert names(front, f"?limit=2&next_page_token={first['nextPageToken']}") == ["c"]
    assert "nextPageToken" not in front.get("/models?limit=2").get_json()
    for limit in ("0", "-1", "x", ""):
        response = front.get(f"/models?limit={limit}")
        assert (response.status_code, response.get_json()["field"]) == (400, "limit")


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


def test_endpoint_variables_are_not_passed_to_models(
    serve_models: Front, model_dir: MakeModel
) -> None:
    http = serve_models(SAGEMAKER_MULTI_MODEL="true", SAGEMAKER_BIND_TO_PORT="8080")
    load(http, "a", model_dir("a"))
    assert http.post("/models/a/invoke").get_json(force=True)["multi"] is None


def test_a_model_from_elsewhere_is_refused(front: FlaskClient) -> None:
    for url in ("/etc", "file:///etc", "relative"):
        assert "option.source_roots" in load(front, "a", url, status=400)["error"]
    assert names(front) == []


def test_lines_of_metrics_have_no_prefix(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """CloudWatch reads its metrics only from lines that are nothing but JSON."""
    code = "print('a log line'); print('{\"_aws\":{}}')"
    container = ModelContainer("a", tmp_path / "s", [sys.executable, "-c", code], os.environ)
    assert not container.wait_until_ready()
    container.kill()
    assert capfd.readouterr().out.splitlines() == ["[a] a log line", '{"_aws":{}}']
