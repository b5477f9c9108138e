"""A FastChat model worker that forwards to a container, for use with FastChat's UI and APIs.

    python -m examples.fastchat.worker --container http://localhost:8080 \\
        --controller http://localhost:21001 --address http://localhost:21002

To FastChat's controller, web UI and OpenAI server it behaves like FastChat's own workers: it
registers, sends heartbeats, counts tokens, and streams records that end with a NUL byte, each with
all of the text so far. It sends requests to the container's /v1/completions.
"""

from __future__ import annotations

import argparse
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from flask import Flask, Response, request

logger = logging.getLogger(__name__)

Record = dict[str, Any]

TIMEOUT_S = 100
"""FastChat's own timeout for calls to workers."""
INTERNAL_ERROR, PARAM_OUT_OF_RANGE = 50001, 40302
"""FastChat's error codes."""
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "presence_penalty", "stop",
            "frequency_penalty", "stop_token_ids", "best_of", "use_beam_search")  # fmt: skip
"""Parameters with the same meaning in FastChat and in the container."""
UNSERVED = ("images", "logprobs")
CONVERSATION: Record = {
    "name": "longshore",
    "system_template": "{system_message}",
    "system_message": "",
    "roles": ["USER", "ASSISTANT"],
    "messages": [],
    "offset": 0,
    "sep_style": 1,  # one line per message: "USER: ..."
    "sep": "\n",
    "sep2": None,
    "stop_str": ["USER:"],
    "stop_token_ids": None,
}
"""The template by which FastChat's OpenAI server builds prompts; `--conversation` overrides it."""


class Worker:
    """Forwards requests to one container."""

    def __init__(self, container: str) -> None:
        self._container = container
        self._lock = threading.Lock()
        self._num_running = 0
        answer = requests.get(f"{container}/v1/models", timeout=TIMEOUT_S)
        answer.raise_for_status()
        model = answer.json()["data"][0]
        self.name: str = model["id"]
        self.context_length: int = model["max_model_len"]

    @property
    def num_running(self) -> int:
        """Number of running requests, which the controller calls the queue length."""
        return self._num_running

    def is_healthy(self) -> bool:
        """Return whether the container passes its health check."""
        try:
            return requests.get(f"{self._container}/ping", timeout=5).ok
        except requests.RequestException:
            return False

    def count_tokens(self, prompt: str) -> int:
        """Return the number of tokens in the prompt."""
        answer = requests.post(
            f"{self._container}/tokenize", json={"prompt": prompt}, timeout=TIMEOUT_S
        )
        answer.raise_for_status()
        return answer.json()["count"]

    def records(self, params: Mapping[str, Any]) -> Iterator[Record]:
        """Yield FastChat's records of one request; an error record ends them."""
        with self._lock:
            self._num_running += 1
        try:
            yield from self._records(params)
        except requests.RequestException as error:
            yield {"text": f"the container does not respond: {error}", "error_code": INTERNAL_ERROR}
        finally:
            with self._lock:
                self._num_running -= 1

    def _records(self, params: Mapping[str, Any]) -> Iterator[Record]:
        if unserved := [name for name in UNSERVED if params.get(name)]:
            yield {"text": f"{unserved[0]}: not supported", "error_code": PARAM_OUT_OF_RANGE}
            return
        text: str = params["prompt"] if params.get("echo", True) else ""
        record: Record = {"error_code": 0, "usage": {}, "finish_reason": None}
        finish_reason = None
        for chunk in self._chunks(self._body(params)):
            if "error" in chunk:
                yield {"text": chunk["error"]["message"], "error_code": INTERNAL_ERROR}
                return
            record["usage"] = chunk["usage"] or record["usage"]
            for choice in chunk["choices"]:
                finish_reason = choice["finish_reason"] or finish_reason
                if choice["text"]:
                    text += choice["text"]
                    yield {**record, "text": text}
        yield {**record, "text": text, "finish_reason": finish_reason}

    def _body(self, params: Mapping[str, Any]) -> Record:
        """Return the request for the container. FastChat's UI may ask for more tokens than fit."""
        room = self.context_length - self.count_tokens(params["prompt"])
        sampling = {
            name: params[name] for name in SAMPLING if params.get(name) not in (None, "", [])
        }
        return {
            **sampling,
            "prompt": params["prompt"],
            "max_tokens": max(1, min(room, params.get("max_new_tokens") or 256)),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _chunks(self, body: Record) -> Iterator[Record]:
        url = f"{self._container}/v1/completions"
        with requests.post(url, json=body, stream=True, timeout=TIMEOUT_S) as answer:
            if not answer.ok:
                yield answer.json()
                return
            for line in answer.iter_lines():
                data = line.removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    yield json.loads(data)


class HeartBeat:
    """Keeps the worker registered at the controller while its container is healthy."""

    def __init__(self, controller: str, address: str, status: Record, worker: Worker) -> None:
        self._controller = controller
        self._address = address
        self._status = status
        self._worker = worker

    def run(self, interval_s: float) -> None:
        """Send heartbeats until the process ends, even after the controller was unreachable."""
        while True:
            if self._worker.is_healthy():
                try:
                    self._beat()
                except requests.RequestException as error:
                    logger.warning("the controller does not respond: %s", error)
            time.sleep(interval_s)

    def _beat(self) -> None:
        answer = self._post("/receive_heart_beat", queue_length=self._worker.num_running)
        if not answer.json()["exist"]:  # first heartbeat, or the controller was restarted
            self._post("/register_worker", check_heart_beat=True, worker_status=self._status)
            logger.info("registered %s", self._address)

    def _post(self, path: str, **body: Any) -> requests.Response:
        body["worker_name"] = self._address
        answer = requests.post(f"{self._controller}{path}", json=body, timeout=5)
        answer.raise_for_status()
        return answer


def create_app(worker: Worker, status: Record, conversation: Record) -> Flask:
    """Return the Flask app with the routes of a FastChat worker."""
    app = Flask("fastchat-worker")

    @app.post("/worker_generate_stream")
    def generate_stream() -> Response:
        records = worker.records(request.get_json())
        return Response(json.dumps(record).encode() + b"\0" for record in records)

    @app.post("/worker_generate")
    def generate() -> Record:
        *_, last = worker.records(request.get_json())
        return last

    @app.post("/worker_get_status")
    def get_status() -> Record:
        return {**status, "queue_length": worker.num_running}

    @app.post("/count_token")
    def count_token() -> Record:
        return {"count": worker.count_tokens(request.get_json()["prompt"]), "error_code": 0}

    @app.post("/worker_get_conv_template")
    def get_conv_template() -> Record:
        return {"conv": conversation}

    @app.post("/model_details")
    def model_details() -> Record:
        return {"context_length": worker.context_length}

    return app


def main() -> None:
    arguments = _arguments()
    logging.basicConfig(level="INFO")
    worker = Worker(arguments.container)
    names = arguments.model_names.split(",") if arguments.model_names else [worker.name]
    status: Record = {"model_names": names, "speed": 1, "queue_length": 0}
    conversation = CONVERSATION
    if arguments.conversation is not None:
        conversation = {**CONVERSATION, **json.loads(arguments.conversation.read_text("utf-8"))}
    heart_beat = HeartBeat(arguments.controller, arguments.address, status, worker)
    threading.Thread(target=heart_beat.run, args=[arguments.interval], daemon=True).start()
    app = create_app(worker, status, conversation)
    app.run(arguments.host, urlsplit(arguments.address).port or 80, threaded=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--container", default="http://localhost:8080")
    parser.add_argument("--controller", default="http://localhost:21001")
    parser.add_argument(
        "--address",
        default="http://localhost:21002",
        help="URL at which FastChat reaches this worker",
    )
    parser.add_argument("--host", default="localhost", help="address to listen on")
    parser.add_argument("--model-names", help="comma-separated; default: the container's model")
    parser.add_argument(
        "--conversation", type=Path, help="JSON file with fields of FastChat's Conversation"
    )
    parser.add_argument("--interval", type=float, default=45, help="seconds between heartbeats")
    return parser.parse_args()


if __name__ == "__main__":
    main()
