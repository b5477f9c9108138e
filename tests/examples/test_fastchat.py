"""The FastChat worker between a minimal controller and a real container."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import requests
from flask import Flask, request
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.container.processes import free_port
from tests.e2e.serving import ROOT, Container
from tests.examples.conftest import ENVIRONMENT, MODULE

INTERVAL_S = 0.05
GREEDY = {"model": "demo", "prompt": "ROMEO:", "temperature": 0.0, "top_p": 1.0, "stop": None,
          "stop_token_ids": None, "repetition_penalty": 1.0, "max_new_tokens": 12}  # fmt: skip


class Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:
        """Log nothing."""


class Controller:
    """Knows workers from their registration until it is told to forget them."""

    def __init__(self) -> None:
        self.registered: Queue[dict[str, Any]] = Queue()
        self.beats: Queue[dict[str, Any]] = Queue()
        self.known: set[str] = set()
        app = Flask("controller")
        app.add_url_rule("/register_worker", view_func=self._register, methods=["POST"])
        app.add_url_rule("/receive_heart_beat", view_func=self._beat, methods=["POST"])
        self.server = make_server("127.0.0.1", 0, app, request_handler=Quiet)

    def _register(self) -> str:
        self.registered.put(request.get_json())
        self.known.add(request.get_json()["worker_name"])
        return "null"

    def _beat(self) -> dict[str, bool]:
        exist = request.get_json()["worker_name"] in self.known
        if exist:
            self.beats.put(request.get_json())
        return {"exist": exist}


@pytest.fixture
def controller() -> Iterator[Controller]:
    controller = Controller()
    thread = Thread(target=controller.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield controller
    controller.server.shutdown()
    controller.server.server_close()
    thread.join()


@pytest.fixture
def worker(container: Container, controller: Controller) -> Iterator[str]:
    """The address of a running worker."""
    address = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [*MODULE, "examples.fastchat.worker", "--address", address, "--host", "127.0.0.1",
         "--container", f"http://127.0.0.1:{container.port}", "--interval", str(INTERVAL_S),
         "--controller", f"http://127.0.0.1:{controller.server.server_port}"],
        cwd=ROOT, env=ENVIRONMENT,
    )  # fmt: skip
    try:
        _wait_until_open(address)
        yield address
    finally:
        process.kill()
        process.wait()


def _wait_until_open(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        try:
            connection.connect()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return
        finally:
            connection.close()


def post(address: str, path: str, **body: Any) -> Any:
    answer = requests.post(f"{address}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def records(address: str, **params: Any) -> list[dict[str, Any]]:
    """Return the messages of a stream, each of which ends with a NUL byte."""
    answer = requests.post(f"{address}/worker_generate_stream", json=GREEDY | params, timeout=60)
    *parts, rest = answer.content.split(b"\0")
    assert rest == b""
    return [json.loads(part) for part in parts]


def test_the_controller_knows_the_worker(controller: Controller, worker: str) -> None:
    status = {"model_names": ["demo"], "speed": 1, "queue_length": 0}
    expected = {"worker_name": worker, "check_heart_beat": True, "worker_status": status}
    assert controller.registered.get(timeout=60) == expected
    assert controller.beats.get(timeout=60) == {"worker_name": worker, "queue_length": 0}
    controller.known.clear()  # as after a restart of the controller
    assert controller.registered.get(timeout=60) == expected
    assert post(worker, "/worker_get_status") == status


def test_worker_routes(container: Container, worker: str) -> None:
    whole_text = container.invoke("ROMEO:", max_new_tokens=12)["generated_text"]
    *parts, last = records(worker, echo=False)
    assert len(parts) > 1
    texts = [part["text"] for part in parts]
    assert all(b.startswith(a) and a != b for a, b in pairwise(texts))
    assert texts[-1] == last["text"] == whole_text
    assert {part["finish_reason"] for part in parts} == {None}
    count = post(worker, "/count_token", prompt="ROMEO:")["count"]
    usage = {"prompt_tokens": count, "completion_tokens": 12, "total_tokens": count + 12}
    assert last == {"text": whole_text, "error_code": 0, "finish_reason": "length", "usage": usage}
    assert post(worker, "/worker_generate", **GREEDY) == {**last, "text": f"ROMEO:{whole_text}"}
    length = post(worker, "/model_details")["context_length"]
    assert length > 12
    conversation = post(worker, "/worker_get_conv_template")["conv"]
    assert set(conversation) == {"name", "system_template", "system_message", "roles", "messages",
                                 "offset", "sep_style", "sep", "sep2", "stop_str",
                                 "stop_token_ids"}  # fmt: skip


def test_limits_and_errors(container: Container, worker: str) -> None:
    whole_text = container.invoke("ROMEO:", max_new_tokens=12)["generated_text"]
    stop = whole_text[3:5]
    *_, last = records(worker, echo=False, stop=[stop])
    assert (last["text"], last["finish_reason"]) == (whole_text[: whole_text.index(stop)], "stop")
    *_, last = records(worker, echo=False, max_new_tokens=1_000_000, stop=whole_text[-1:])
    assert last["error_code"] == 0, "FastChat may request more tokens than fit"
    (refused,) = records(worker, temperature=-1)
    assert refused["error_code"] == 50001
    assert "temperature" in refused["text"]
    (refused,) = records(worker, images=["x"])
    assert (refused["error_code"], refused["text"]) == (40302, "images: not supported")
    assert post(worker, "/worker_get_status")["queue_length"] == 0
