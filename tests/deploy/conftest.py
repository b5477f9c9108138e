"""AWS over HTTP: moto's server with injected faults, and boto3 pointed at it."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import boto3
import pytest
from botocore.loaders import JSONFileLoader
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from deploy.sagemaker.resources.aws import Aws

REGION = "eu-west-1"
ROLE = "arn:aws:iam::123456789012:role/SageMaker"
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/longshore:latest"

CREATING = {
    "EndpointArn": "arn:aws:sagemaker:eu-west-1:123456789012:endpoint/demo",
    "EndpointConfigName": "demo",
    "EndpointStatus": "Creating",
}
FAILED = {**CREATING, "EndpointStatus": "Failed", "FailureReason": "no answer to /ping"}
"""Responses of DescribeEndpoint."""

App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class Failure(NamedTuple):
    """An error as services with SageMaker's protocol send it."""

    code: str
    message: str = ""


class Faulty:
    """A WSGI application that replaces the responses to some calls.

    A call is named as in the header X-Amz-Target of SageMaker's protocol.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self.clear()

    def clear(self) -> None:
        self._scripts: dict[str, list[dict[str, Any] | Failure]] = {}
        self.calls: Counter[str] = Counter()
        self.bodies: dict[str, list[Any]] = {}
        # moto has no inference components.
        self.answers("ListInferenceComponents", {"InferenceComponents": []})

    def answers(self, operation: str, *answers: dict[str, Any] | Failure) -> None:
        """Answer calls with these responses in turn, then always with the last."""
        self._scripts[operation] = list(answers)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        operation = environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
        self.calls[operation] += 1
        script = self._scripts.get(operation)
        if script is None:
            return self._app(environ, start_response)
        size = int(environ.get("CONTENT_LENGTH") or 0)
        self.bodies.setdefault(operation, []).append(json.loads(environ["wsgi.input"].read(size)))
        answer, status = script.pop(0) if len(script) > 1 else script[0], 200
        if isinstance(answer, Failure):
            answer, status = {"__type": answer.code, "message": answer.message}, 400
        start_response(f"{status} -", [("Content-Type", "application/x-amz-json-1.1")])
        return [json.dumps(answer).encode()]


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="session", autouse=True)
def _models_are_parsed_once() -> Iterator[None]:
    """Cache botocore's service descriptions, which each boto3 session parses for half a second."""
    load_file = cache(JSONFileLoader().load_file)
    with patch.object(JSONFileLoader, "load_file", lambda _, path: load_file(path)):
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, Faulty]]:
    faulty = Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faulty, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", faulty
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def faulty(server: tuple[str, Faulty], monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """A fresh account, which all boto3 clients of this process use."""
    url, faulty = server
    faulty.clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    reset_account(url)
    return faulty


def reset_account(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()


class Clock:
    """A fake clock that only advances in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def printed() -> list[str]:
    return []


@pytest.fixture
def aws(faulty: Faulty, clock: Clock, printed: list[str]) -> Aws:
    return Aws(say=printed.append, clock=clock, sleep=clock.sleep)


@pytest.fixture
def peek(faulty: Faulty) -> Callable[[str], Any]:
    """Return a client for the test itself, to inspect the account."""
    return boto3.Session(region_name=REGION).client


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory with a nested file and a hidden file."""
    path = tmp_path / "model"
    (path / "onnx").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(3000))
    (path / "onnx" / "weights").write_bytes(b"w")
    (path / ".cache").write_text("not the model's")
    return path


@pytest.fixture
def up(model_dir: Path) -> list[str]:
    """A command line for an endpoint. Its instance type is the newest that moto knows."""
    return [
        *("up", "--name", "demo", "--image", IMAGE, "--role", ROLE),
        *("--instance-type", "ml.g4dn.xlarge", "--model-dir", str(model_dir)),
    ]
