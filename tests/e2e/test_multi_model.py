"""A multi-model endpoint end to end: real processes and the demo model."""

from __future__ import annotations

import json
import shutil

import boto3
import pytest

from tests.container.processes import descendants, is_gone
from tests.e2e.serving import DEMO, IMAGE, model_url, serve_models

ASK = {"inputs": "ROMEO:", "parameters": {"max_new_tokens": 12}}
NO_MEMORY = """
def model_fn(model_dir):
    return bytearray(2**62)
"""


@pytest.fixture
def models(tmp_path):
    """Two models with equal answers and different strategies, and two that fail to load."""
    path = tmp_path / "models"
    for name, properties in (
        ("paged", "option.batching=paged\noption.dtype=fp32\n"),
        ("dynamic", "option.batching=dynamic\noption.dtype=fp32\nmax_batch_delay=1\n"),
    ):
        copy = shutil.copytree(DEMO, path / name / "model")
        (copy / "serving.properties").write_text(properties)
    for name, handler in (("no-memory", NO_MEMORY), ("wrong", "def handle(inputs:\n")):
        (path / name / "model").mkdir(parents=True)
        (path / name / "model" / "model.py").write_text(handler)
    return path


@pytest.mark.matrix(cases=0)
@pytest.mark.timeout(300)  # starts four engines
def test_models_are_loaded_and_unloaded(tmp_path, models):
    with serve_models(tmp_path, models, OPTION_LOCAL_RUNTIME_API="true") as container:

        def load(name):
            body = {"model_name": name, "url": model_url(models, name)}
            status, data = container.request("POST", "/models", body)
            return status, json.loads(data).get("error")

        def invoke(name):
            status, data = container.request("POST", f"/models/{name}/invoke", ASK)
            assert status == 200, data
            return json.loads(data)["generated_text"]

        def names():
            listed = json.loads(container.request("GET", "/models")[1])["models"]
            return [entry["modelName"] for entry in listed]

        def stream(name):
            return container.stream(
                ASK["inputs"], path=f"/models/{name}/invoke", max_new_tokens=400
            )

        assert names() == []
        assert load("paged") == (200, None)
        assert load("paged")[0] == 409
        first = set(descendants(container.process.pid))
        assert load("dynamic") == (200, None)
        assert names() == ["dynamic", "paged"]
        text = invoke("paged")
        assert invoke("dynamic") == text
        container.wait_for_log("[dynamic]   batching: dynamic")

        client = boto3.client(
            "sagemaker-runtime",
            endpoint_url=f"http://127.0.0.1:{container.port}",
            region_name="us-east-1",
            aws_access_key_id="none",
            aws_secret_access_key="none",
        )
        invocation = {"EndpointName": "any", "TargetModel": "dynamic", "Body": json.dumps(ASK)}
        answer = client.invoke_endpoint(**invocation, ContentType="application/json")
        assert json.loads(answer["Body"].read())["generated_text"] == text
        metrics = container.request("GET", "/metrics")[1].decode()
        for name in ("paged", "dynamic"):
            assert f'vllm:generation_tokens_total{{batching="{name}",model_name="{name}"}}' in (
                metrics
            )

        with stream("paged") as lines:
            next(lines)
            # A model that fails or stops does not affect the others.
            status, reason = load("wrong")
            assert (status, "model.py:1: SyntaxError" in reason) == (400, True)
            status, reason = load("no-memory")
            assert (status, "out of memory" in reason) == (507, True)
            with stream("dynamic") as others:
                next(others)
            assert container.request("DELETE", "/models/dynamic")[0] == 200
            assert names() == ["paged"]
            if not IMAGE:  # with an image, buildah's own processes are children, too
                assert set(descendants(container.process.pid)) <= first, "no process is left"
            assert list(lines)[-1]["generated_text"]
        assert container.request("DELETE", "/models/dynamic")[0] == 404

        assert load("dynamic") == (200, None)
        assert invoke("dynamic") == text
        pids = descendants(container.process.pid)
        assert container.stop() == 0
        assert all(map(is_gone, pids))
