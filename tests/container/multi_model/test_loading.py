"""Loading and unloading of models. Each model is a real process that echoes requests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import gevent
import pytest
from flask.testing import FlaskClient

from container.multi_model.model_container import ModelContainer
from tests.container.conftest import eventually
from tests.container.multi_model.fronts import MakeModel, ServeModels, load, names
from tests.container.processes import children


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


def test_a_model_among_several_has_one_copy_on_one_machine(
    front: FlaskClient, model_dir: MakeModel
) -> None:
    error = load(front, "a", model_dir("a", copies=2), status=400)["error"]
    assert "cannot have copies; leave the option out" in error
    error = load(front, "b", model_dir("b", nodes=2), status=400)["error"]
    assert (
        "option.nodes=2: a model that shares the port with other models runs on one machine"
        in error
    )


def test_a_model_larger_than_memory_is_not_started(
    front: FlaskClient, model_dir: MakeModel
) -> None:
    url = model_dir("huge", "refuse", kv_cache_memory_bytes=2**60)
    sizes = {"num_attention_heads": 1, "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    (Path(url) / "config.json").write_text(json.dumps(sizes))
    error = load(front, "huge", url, status=507)["error"]
    assert "needs at least 1,099,511,627,776 MiB" in error


def test_gpu_memory_shares(serve_models: ServeModels, model_dir: MakeModel) -> None:
    """Each model goes to the GPU that has the most memory left.

    A model that does not fit is rejected until another model is unloaded.
    """
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
        "0.2 of a GPU's memory (option.gpu_memory_utilization), but other models already take 0.9"
        in error
    )
    assert names(http) == ["a", "b", "c", "d"]
    load(http, "f", model_dir("f", device="cpu"))
    assert echoed("f") == ("3,5", "0.000000"), "a model on the CPU takes no share"
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
    before = len(children(os.getpid()))
    body = {"model_name": "a", "url": model_dir("a", "never-ready")}
    loading = gevent.spawn(front.application.test_client().post, "/models", json=body)
    waiting = gevent.spawn(
        front.application.test_client().post, "/models", json={**body, "model_name": "b"}
    )
    eventually(lambda: names(front) == ["a", "b"])
    eventually(lambda: len(children(os.getpid())) > before)
    gevent.sleep(0.1)
    assert len(children(os.getpid())) == before + 1, "only one model loads at a time"
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
    monkeypatch.setattr("container.multi_model.model_registry.STOP_S", 0.1)
    load(front, "a", model_dir("a", "stays"))
    assert front.delete("/models/a").status_code == 200


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


def test_endpoint_variables_are_not_passed_to_models(
    serve_models: ServeModels, model_dir: MakeModel
) -> None:
    http = serve_models(SAGEMAKER_MULTI_MODEL="true", SAGEMAKER_BIND_TO_PORT="8080")
    load(http, "a", model_dir("a"))
    assert http.post("/models/a/invoke").get_json(force=True)["multi"] is None


def test_a_model_outside_the_source_roots_is_refused(front: FlaskClient) -> None:
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
