"""A real gunicorn process with a fake engine: streams, disconnects and shutdown."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from container.front_end.connections import EXTRA_CONNECTIONS, OTHER_FILES
from container.front_end.start import NICENESS
from core.configuration.options import make_options
from core.protocol.launch import Launch
from core.protocol.messages import Abort, Submit
from tests.container.fake_engine import FakeEngine, says, stalls
from tests.container.processes import (
    HANG_S,
    Caller,
    descendants,
    is_gone,
    running,
    wait_until,
)
from tests.container.test_ports import needs_ipv6

STREAM = {"inputs": "Q", "stream": True}
HEAD, MORE = b"POST /invocations HTTP/1.1\r\nHost: x\r\n", bytes(2**22)
"""The first lines of a request, and more of its body than any buffer takes."""


def write_launch(
    directory: Path, tokenizer_dir: Path, endpoint: str, port: int, **options: Any
) -> Path:
    launch = Launch(
        model_dir=str(tokenizer_dir),
        endpoint=endpoint,
        port=port,
        options=make_options({"http_workers": 1, **options}),
    )
    path = directory / "launch.json"
    path.write_bytes(msgspec.json.encode(launch))
    return path


def with_time_to_stop(seconds: float, launch: Path) -> str:
    """Return a program that runs a front end. When it stops, requests may take `seconds` more."""
    return (
        "import container.front_end.start as start; "
        f"start.GRACEFUL_TIMEOUT_S = {seconds:.0f}; start.main('{os.getpid()}', {str(launch)!r})"
    )


@pytest.fixture
def front_end(
    tmp_path: Path, tokenizer_dir: Path, engine: FakeEngine, endpoint: str, caller: Caller
) -> Iterator[subprocess.Popen[str]]:
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port, max_connections=16)
    with running(["-c", with_time_to_stop(10 * HANG_S, launch)]) as process:
        wait_until(caller.is_healthy)
        yield process
        pids = [process.pid, *descendants(process.pid)]
        process.kill()
        wait_until(lambda: all(map(is_gone, pids)))


def test_the_front_end_leaves_the_cores_to_the_engine(front_end: subprocess.Popen[str]) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    workers = descendants(front_end.pid)
    assert workers
    for pid in (front_end.pid, *workers):
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + NICENESS, 19)


def test_streams_disconnects_and_shutdown(
    front_end: subprocess.Popen[str], engine: FakeEngine, caller: Caller
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(caller.post, [STREAM] * 8))
    for status, body in answers:
        last = json.loads(body.splitlines()[-1])
        assert (status, last["generated_text"]) == (200, "Hi there")
        assert body.endswith(b"\n")

    engine.script = stalls(after=[65])
    for body in (STREAM, {"inputs": "Q"}):
        submitted = len(engine.of_type(Submit))
        aborted = len(engine.of_type(Abort))
        connection = caller.open(body)
        wait_until(lambda seen=submitted: len(engine.of_type(Submit)) > seen)
        connection.close()
        wait_until(lambda seen=aborted: len(engine.of_type(Abort)) > seen)

    assert caller.is_healthy()
    # The request is answered. Its connection is then kept alive, although it is idle.
    with caller.open({"inputs": "no", "stream": "maybe"}) as idle:
        answer = idle.recv(4096)
        while not answer.endswith(b"}"):
            answer += idle.recv(4096)
        assert answer.startswith(b"HTTP/1.1 400")
        pids = [front_end.pid, *descendants(front_end.pid)]
        front_end.send_signal(signal.SIGTERM)
        assert front_end.wait(HANG_S) == 0, "it does not wait for idle connections"
        assert idle.recv(1) == b""
    assert all(map(is_gone, pids))
    output, errors = front_end.communicate()
    assert errors == ""
    assert output == ""


def exchange(caller: Caller, *parts: bytes) -> bytes:
    """Send all parts; return everything that comes until the server ends the connection."""
    with socket.create_connection(("127.0.0.1", caller.port), timeout=HANG_S) as connection:
        for part in parts:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_refusal_reaches_a_client_that_still_sends(
    front_end: subprocess.Popen[str], engine: FakeEngine, caller: Caller
) -> None:
    """If the server closed the connection with data unread, the kernel would reset it, and the
    client might never see the response.
    """
    engine.script = stalls(after=[65])
    with ExitStack() as busy:
        for _ in range(16):
            busy.enter_context(caller.open(STREAM))
        wait_until(lambda: len(engine.of_type(Submit)) == 16)
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(MORE)
        assert exchange(caller, whole, MORE).startswith(b"HTTP/1.1 503")


def test_a_bad_body_is_refused_while_the_client_still_sends(
    front_end: subprocess.Popen[str], caller: Caller
) -> None:
    chunked = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    assert exchange(caller, chunked, MORE).startswith(b"HTTP/1.1 400")


def test_running_requests_may_finish(
    front_end: subprocess.Popen[str], engine: FakeEngine, caller: Caller
) -> None:
    engine.script = stalls(after=[65])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(caller.post, STREAM)
        wait_until(lambda: engine.of_type(Submit))
        (submit,) = engine.of_type(Submit)
        assert isinstance(submit, Submit)
        front_end.send_signal(signal.SIGTERM)
        wait_until(lambda: caller.ping() is None)
        assert front_end.poll() is None
        for step in says([66])(submit):
            engine.send(step)
        status, body = answer.result()
    assert status == 200
    # The tokens 65 and 66 are the letters b and c.
    assert json.loads(body.splitlines()[-1])["generated_text"] == "bc"
    assert front_end.wait(HANG_S) == 0


JUMPING_CLOCK = """
import itertools, time
hours = itertools.count()
time.time = lambda: 1e9 + 3600 * next(hours)
"""


@pytest.mark.parametrize("clock", ["", JUMPING_CLOCK])
def test_requests_that_do_not_finish_get_an_error(
    tmp_path: Path,
    tokenizer_dir: Path,
    engine: FakeEngine,
    endpoint: str,
    caller: Caller,
    clock: str,
) -> None:
    """However somebody sets the clock, they have their time to finish."""
    engine.script = stalls(after=[65])
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port)
    program = clock + with_time_to_stop(2, launch)
    with running(["-c", program]) as process, ThreadPoolExecutor(1) as pool, ExitStack() as exits:
        wait_until(caller.is_healthy)
        whole = pool.submit(caller.post, {"inputs": "Q"})
        stream = exits.enter_context(caller.open(STREAM))
        response = http.client.HTTPResponse(stream)
        response.begin()
        response.readline()  # its first token: from now on, errors are records of the stream
        wait_until(lambda: len(engine.of_type(Submit)) == 2)
        process.send_signal(signal.SIGTERM)
        streamed, (status, body) = response.read(), whole.result()
        assert process.wait(HANG_S) == 0
    last = json.loads(streamed.splitlines()[-1])
    assert last["token"]["error_msg"] == "the server is stopping"
    assert (status, json.loads(body)["error"]) == (424, "the server is stopping")


def test_connections_over_the_maximum_are_refused_if_none_is_idle(
    tmp_path: Path, tokenizer_dir: Path, engine: FakeEngine, endpoint: str, caller: Caller
) -> None:
    engine.script = stalls(after=[65])
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port, max_connections=8)
    with (
        running(["-m", "container.front_end.start", str(os.getpid()), str(launch)]),
        contextlib.ExitStack() as streams,
    ):
        wait_until(caller.is_healthy)
        for _ in range(8):
            streams.enter_context(caller.open(STREAM))
        wait_until(lambda: len(engine.of_type(Submit)) == 8)
        with caller.open(STREAM) as ninth:
            response = http.client.HTTPResponse(ninth)
            response.begin()
            body = json.loads(response.read())
        assert (response.status, body["code"]) == (503, 503)
        assert "8 connections are open (option.max_connections)" in body["error"]
        assert response.headers["Retry-After"]
        assert caller.ping() == 200
        assert len(engine.of_type(Submit)) == 8


@needs_ipv6
def test_clients_of_ipv4_and_of_ipv6(front_end: subprocess.Popen[str], caller: Caller) -> None:
    """Both may see the live page, which is only for clients of this machine."""
    for address in ("127.0.0.1", "::1"):
        client = http.client.HTTPConnection(address, caller.port, timeout=HANG_S)
        for path in ("/ping", "/"):
            client.request("GET", path)
            response = client.getresponse()
            response.read()
            assert response.status == 200, (address, path)
        client.close()


def test_few_open_files_mean_few_connections(
    tmp_path: Path, tokenizer_dir: Path, engine: FakeEngine, endpoint: str, caller: Caller
) -> None:
    """More idle connections than files do not keep health checks from their answer."""
    few = EXTRA_CONNECTIONS + OTHER_FILES + 8
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port)
    command = ["-m", "container.front_end.start", str(os.getpid()), str(launch)]

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    with running(command, preexec_fn=limit_files) as process, contextlib.ExitStack() as idle:
        wait_until(caller.is_healthy)
        for _ in range(few + 8):
            idle.enter_context(socket.create_connection(("127.0.0.1", caller.port)))
        assert caller.ping() == 200
        assert caller.post({"inputs": "Q"})[0] == 200
        process.terminate()
        _, errors = process.communicate(timeout=HANG_S)
    assert "at most 8 connections instead of 4096 (option.max_connections), because" in errors
    assert "Too many open files" not in errors


def test_port_in_use(
    front_end: subprocess.Popen[str],
    tmp_path: Path,
    tokenizer_dir: Path,
    endpoint: str,
    caller: Caller,
) -> None:
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port)
    with running(["-m", "container.front_end.start", str(os.getpid()), str(launch)]) as second:
        _, errors = second.communicate(timeout=HANG_S)
    assert second.returncode == 2
    assert errors == (
        f"longshore: port {caller.port}: Address already in use; choose another with --port\n"
    )


@pytest.mark.parametrize(
    ("given", "name", "shown"),
    [(None, "", "llama"), ("mine", "", "mine"), ("mine", "loaded-as", "loaded-as")],
)
def test_the_name_that_clients_see(given: str | None, name: str, shown: str) -> None:
    options = make_options({"served_model_name": given})
    launch = Launch(model_dir="/models/llama", endpoint="", port=0, name=name, options=options)
    assert launch.model_name == shown
