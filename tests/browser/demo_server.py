"""Serves the demo model for a browser."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
START_S = 180
STOP_S = 30


@contextmanager
def demo_server(*flags: str) -> Iterator[str]:
    """Serve models/demo with these flags of `serve`, and yield the address once it is ready.

    Raises RuntimeError, with the end of the server's log, if it does not become ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(PYTHON), "-m", "container", "serve", "--port", str(port),
        "--model-dir", str(ROOT / "models" / "demo"), *flags,
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _becomes_ready(f"{url}/ping", server):
                log.seek(0)
                raise RuntimeError(f"the server is not ready: {log.read()[-2000:]}")
            yield url
        finally:
            _stop(server)


def _becomes_ready(url: str, server: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return True
        except OSError:
            time.sleep(0.2)
    return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
