"""Helpers to start the container's processes and to talk HTTP to them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANG_S = 60.0
"""The limit of waits that should end much sooner. It lets a test fail instead of hanging. Nothing
that a test checks may depend on this time, because busy machines are slow."""


_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """Return a port that the kernel gives to nobody else while this process runs.

    A server can still listen at it, because servers set SO_REUSEADDR, too.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    _RESERVED.append(reserved)
    return reserved.getsockname()[1]


def wait_until(predicate: Callable[[], object], timeout_s: float = HANG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@contextmanager
def running(arguments: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    """Run Python in the checkout; kill the process at the end if it is still running."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running_alone(
    arguments: list[str], run_dirs: Path, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """Like `running`, but the process leads a session and has `run_dirs` as its TMPDIR.

    At the end, kill the process, and check that its descendants end, too.
    """
    environment = {**os.environ, **variables, "TMPDIR": str(run_dirs)}
    with running(arguments, env=environment, start_new_session=True) as process:
        try:
            yield process
        finally:
            pids = [process.pid, *descendants(process.pid)]
            process.kill()
            wait_until(lambda: all(map(is_gone, pids)))


def is_gone(pid: int) -> bool:
    """Return whether the process has ended, reaped or not."""
    return _state(pid) in ("", "Z")


def _state(pid: int) -> str:
    """Return the letter of the process's state, as in proc(5), or '' if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def children(pid: int) -> list[int]:
    """Return the ids of the child processes of all threads of a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop these processes during the block, as if the machine had no time for them."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: {_state(pid) for pid in pids} <= {"T"})
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class Caller:
    """An HTTP client of one server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ping(self) -> int | None:
        """Return the status of /ping, or None if the connection fails."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            connection.request("GET", "/ping")
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()

    def is_healthy(self) -> bool:
        return self.ping() == 200

    def post(self, body: object) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            connection.request("POST", "/invocations", json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def open(self, body: object) -> socket.socket:
        """Send a request without waiting for the response."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)
        head = f"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection
