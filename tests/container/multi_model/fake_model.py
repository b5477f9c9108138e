"""A fake for container.multi_model.child. It takes the same arguments and echoes its requests.

`python -m tests.container.multi_model.fake_model PARENT URL NAME SOCKET SHARE_OF_OTHERS OVERRIDES`

The directory at the URL may hold a file `mode` with one word that says what goes wrong:
`refuse` (the model is wrong), `short` (too little memory), `killed` (SIGKILL while loading),
`never-ready`, or `stays` (SIGTERM does not end it).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer

from core.process.processes import die_with_parent

METRICS = """# HELP vllm:num_requests_running Sequences in the batch.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{name}"}} 1.0
# HELP vllm:prompt_tokens_total Prompt tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{model_name="{name}"}} 5.0
"""


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = False
    request_queue_size = 64

    def __init__(self, url: Path, name: str, socket: str, share: str) -> None:
        super().__init__(socket, Handler)
        self.url, self.name, self.share = url, name, share


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def address_string(self) -> str:
        return "front"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/metrics":
            self.answer(200, METRICS.format(name=self.server.name).encode())
        else:
            self.answer(200 if path == "/ping" else 404, b"{}")

    def do_POST(self) -> None:
        match self.path.split("?")[0]:
            case "/early":
                self.close_connection = True
                self.answer(413, b"too much")
            case "/no-content":
                self.head(204, ("Content-Length", "5"))
            case "/stream":
                self.stream()
            case "/cut":
                self.head(200, ("Content-Length", "10"))
                self.wfile.write(b"half")
                self.close_connection = True
            case "/no-utf-8":
                self.answer(200, b'"\xff"')
            case "/crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "/wait":
                self.wait()
            case _:
                self.tell(self.read())

    def tell(self, body: bytes) -> None:
        """Answer with the request as JSON."""
        echo = {
            "name": self.server.name,
            "share": self.server.share,
            "path": self.path,
            "body": body.decode("latin-1"),
            "headers": {name.lower(): value for name, value in self.headers.items()},
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "multi": os.environ.get("SAGEMAKER_MULTI_MODEL"),
        }
        self.answer(201, json.dumps(echo).encode(), ("X-Own", "kept"), ("X-Request-Id", "own-id"))

    def stream(self) -> None:
        """Stream a first line, wait until the file `end` has a line, and stream it as the last."""
        self.head(200, ("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"))
        end = self.server.url / "end"
        self.piece(b"first\n")
        while not (end.exists() and end.stat().st_size):
            time.sleep(0.01)
        self.piece(end.read_bytes())
        self.piece(b"")

    def wait(self) -> None:
        """Create the file `waits`, wait until the client hangs up, and create the file `gone`."""
        self.read()
        (self.server.url / "waits").touch()
        self.connection.recv(1)
        (self.server.url / "gone").touch()

    def read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def answer(self, code: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.head(code, *headers, ("Content-Length", str(len(body))))
        self.wfile.write(body)

    def head(self, code: int, *headers: tuple[str, str]) -> None:
        self.send_response(code)
        for header in headers:
            self.send_header(*header)
        self.end_headers()


def main(parent: str, url: str, name: str, socket: str, share: str, *_: str) -> None:
    die_with_parent(int(parent))
    path = Path(url)
    mode = (path / "mode").read_text() if (path / "mode").exists() else "well"
    print(f"mode={mode}", flush=True)
    if mode == "refuse":
        print("longshore: the model is wrong", file=sys.stderr)
        sys.exit(2)
    if mode == "short":
        print("longshore: no memory is left", file=sys.stderr)
        sys.exit(3)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "never-ready":
        time.sleep(60)
    server = Server(path, name, socket, share)
    ends = threading.Thread(target=server.shutdown)

    def end(*_: object) -> None:
        """Stop as the supervisor does: let running requests finish, unless a signal comes again."""
        if ends.ident is not None:
            os._exit(1)
        (path / "asked").touch()
        if mode != "stays":
            ends.start()

    signal.signal(signal.SIGTERM, end)
    server.serve_forever(0.01)
    server.socket.close()
    server.server_close()  # waits for running requests


if __name__ == "__main__":
    main(*sys.argv[1:])
