"""A stub server that streams scripted responses and keeps the requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[str, dict[str, Any]], Iterator[bytes | float]]
"""Takes a path and a body. Yields parts of the response, and the seconds to wait between them."""

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="stub"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="stub"} 0.5
"""


MODELS = json.dumps({"data": [{"id": "stub", "max_model_len": 4096}]}).encode()


def lmi(path: str, body: dict[str, Any]) -> Iterator[bytes | float]:
    """Stream as many tokens as requested in LMI's schema, or return all samples as one document."""
    parameters = body["parameters"]
    count, samples = parameters["max_new_tokens"], parameters.get("n", 1)
    details = {"finish_reason": "length", "generated_tokens": count}
    if not body["stream"]:
        others = [{"generated_text": "x", "generated_tokens": count}] * (samples - 1)
        details["best_of_sequences"] = others
        yield json.dumps({"generated_text": "x", "details": details}).encode()
        return
    for at in range(count):
        record: dict[str, Any] = {"token": {"id": at, "text": "x", "log_prob": -1.0}}
        if at == count - 1:
            record |= {"generated_text": "x" * count, "details": details}
        yield json.dumps(record).encode() + b"\n"


def openai(path: str, body: dict[str, Any]) -> Iterator[bytes | float]:
    """Stream OpenAI completions with two tokens per chunk."""
    count, samples = body["max_tokens"], body.get("n", 1)
    for index in range(samples):
        for _ in range(0, count, 2):
            yield _event({"choices": [{"index": index, "text": "xx", "finish_reason": None}]})
    yield _event(
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count * samples}}
    )
    yield b"data: [DONE]\n\n"


def _event(record: object) -> bytes:
    return b"data: " + json.dumps(record).encode() + b"\n\n"


class Stub(ThreadingHTTPServer):
    """A running stub. Tests set its responses and read the requests it received."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.script = script
        self.metrics = METRICS
        self.status = 200
        self.breaks_off = False
        """Whether streams end without their last chunk."""
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = 0


@contextmanager
def serving(script: Script = lmi) -> Iterator[Stub]:
    """Run a stub on a free port."""
    stub = Stub(script)
    thread = threading.Thread(target=stub.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        thread.join()
        stub.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_GET(self) -> None:
        known = {"/metrics": self.server.metrics.encode(), "/v1/models": MODELS}
        self._send(200 if self.path in known else 404, known.get(self.path, b""))

    def do_POST(self) -> None:
        stub, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send(200, json.dumps({"count": len(body["prompt"].split())}).encode())
            return
        stub.bodies.append(body)
        if stub.status == 200 and not body["stream"]:
            self._send(200, b"".join(stub.script(self.path, body)))
        elif stub.status == 200:
            self._stream(stub.script(self.path, body))
        else:
            self._send(stub.status, b'{"error":"busy"}')

    def _stream(self, parts: Iterator[bytes | float]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            if isinstance(part, float):
                time.sleep(part)
            else:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.close_connection = self.server.breaks_off
        if not self.server.breaks_off:
            self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_one_request(self) -> None:
        # An interrupted client, or one that has read enough, hangs up.
        with suppress(ConnectionError):
            super().handle_one_request()

    def log_message(self, *_: object) -> None:
        pass
