"""The multi-model server process: streams, disconnects, signals and leftover processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from container.front_end.connections import EXTRA_CONNECTIONS, OTHER_FILES
from tests.container.processes import (
    HANG_S,
    Caller,
    descendants,
    is_gone,
    running_alone,
    wait_until,
)
from tests.container.test_ports import needs_ipv6

Start = Callable[..., AbstractContextManager[subprocess.Popen[str]]]
Model = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Return a function that creates a model in the test's store."""

    def make(name: str, mode: str = "well") -> Path:
        path = tmp_path / "store" / name
        path.mkdir(parents=True)
        (path / "serving.properties").touch()
        (path / "mode").write_text(mode)
        return path

    return make


@pytest.fixture
def start(caller: Caller, short_dir: Path, tmp_path: Path) -> Start:
    """Return a function that starts the server. At the end, its processes must have ended, too."""

    def start(*stores: Path, **options: object) -> AbstractContextManager[subprocess.Popen[str]]:
        arguments = [
            "-m",
            "tests.container.multi_model.run_models",
            str(caller.port),
            *map(str, stores),
        ]
        variables = {f"OPTION_{name.upper()}": str(value) for name, value in options.items()}
        return running_alone(arguments, short_dir, OPTION_SOURCE_ROOTS=str(tmp_path), **variables)

    return start


def ends_well(process: subprocess.Popen[str]) -> None:
    """Stop the server. Check that it exits with status 0 and has logged no traceback."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 0
    _, errors = process.communicate()
    assert "Traceback" not in errors


def ask(caller: Caller, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", caller.port, timeout=HANG_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def load(caller: Caller, name: str, path: Path) -> None:
    assert ask(caller, "POST", "/models", {"model_name": name, "url": str(path)})[0] == 200


def send(caller: Caller, path: str, *headers: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", caller.port), timeout=HANG_S)
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Length: 0", *headers, "", ""]
    connection.sendall("\r\n".join(lines).encode())
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        part = connection.recv(4096)
        assert part, data
        data += part
    return data


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(4096), b""))


def test_streams_are_passed_on_as_they_come(start: Start, caller: Caller, model: Model) -> None:
    path = model("a")
    with start() as process:
        wait_until(caller.is_healthy)
        load(caller, "a", path)
        with send(caller, "/models/a/stream") as connection:
            head = read_until(connection, b"6\r\nfirst\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert b"text/event-stream" in head
            (path / "end").write_text("last\n")
            assert read_until(connection, b"0\r\n\r\n") == b"5\r\nlast\n\r\n0\r\n\r\n"
        assert process.poll() is None


def test_chunked_bodies_are_passed_on(start: Start, caller: Caller, model: Model) -> None:
    with start():
        wait_until(caller.is_healthy)
        load(caller, "a", model("a"))
        connection = http.client.HTTPConnection("127.0.0.1", caller.port, timeout=HANG_S)
        connection.request("POST", "/models/a/invoke", iter([b"one ", b"two"]))
        assert json.loads(connection.getresponse().read())["body"] == "one two"
        connection.close()


def test_clients_have_the_time_limits_of_a_single_model(start: Start, caller: Caller) -> None:
    head = b"POST /models HTTP/1.1\r\nHost: x\r\n"
    statuses = {
        b"POST /models HTT": 408,
        head: 408,
        head + b"Content-Length: 99\r\n\r\n{": 408,
        head + b"Transfer-Encoding: chunked\r\n\r\n9\r\nab": 408,
        b"\x16\x03\x01\x00\xc8\x01\x00": 400,
    }

    def answer_to(data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", caller.port), timeout=HANG_S) as connection:
            connection.sendall(data)
            return read_all(connection)

    with start(header_timeout=4, body_timeout=4) as process, ThreadPoolExecutor(5) as pool:
        wait_until(caller.is_healthy)
        for answer, status in zip(pool.map(answer_to, statuses), statuses.values(), strict=True):
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == status
        ends_well(process)


def test_connections_have_a_maximum(start: Start, caller: Caller, model: Model) -> None:
    """Idle connections make room. If no connection is idle, only health checks are answered."""
    with start(max_connections=3) as process:
        wait_until(caller.is_healthy)
        path = model("a")
        load(caller, "a", path)
        with ExitStack() as opened:
            idle = [opened.enter_context(send(caller, "/ping")) for _ in range(5)]
            assert read_all(idle[0]).startswith(b"HTTP/1.1 200"), "answered, then closed"
            for _ in range(3):
                busy = opened.enter_context(send(caller, "/models/a/stream"))
                read_until(busy, b"first\n\r\n")
            assert caller.is_healthy()
            status, answer = ask(caller, "GET", "/models")
            assert (status, json.loads(answer)["code"]) == (503, 503)
            assert b"option.max_connections" in answer
            (path / "end").write_text("last\n")
        ends_well(process)


@needs_ipv6
def test_clients_of_ipv4_and_of_ipv6(start: Start, caller: Caller) -> None:
    with start():
        wait_until(caller.is_healthy)
        client = http.client.HTTPConnection("::1", caller.port, timeout=HANG_S)
        client.request("GET", "/ping")
        assert client.getresponse().status == 200
        client.close()


def test_few_open_files_mean_few_connections(
    caller: Caller, model: Model, short_dir: Path, tmp_path: Path
) -> None:
    """Each request has a file for its client and one for its model."""
    few = OTHER_FILES + 2 * (EXTRA_CONNECTIONS + 4)
    program = (
        "import resource; from tests.container.multi_model.run_models import main; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({few}, {few})); main('{caller.port}')"
    )
    started = running_alone(["-c", program], short_dir, OPTION_SOURCE_ROOTS=str(tmp_path))
    with started as process, ExitStack() as opened:
        wait_until(caller.is_healthy)
        path = model("a")
        load(caller, "a", path)
        for _ in range(4):
            busy = opened.enter_context(send(caller, "/models/a/stream"))
            read_until(busy, b"first\n\r\n")
        for _ in range(few):
            opened.enter_context(socket.create_connection(("127.0.0.1", caller.port)))
        assert caller.is_healthy()
        (path / "end").write_text("last\n")
        process.terminate()
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert "at most 4 connections instead of 4096 (option.max_connections), because" in errors
    assert "Too many open files" not in errors


def test_a_client_that_does_not_read_is_cut_off(start: Start, caller: Caller, model: Model) -> None:
    with start(write_timeout=1) as process, socket.socket() as connection:
        wait_until(caller.is_healthy)
        load(caller, "a", model("a"))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", caller.port))
        body = b"x" * 2**23  # the model sends it back
        connection.sendall(b"POST /models/a/invoke HTTP/1.1\r\nHost: x\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert process.stderr is not None
        assert any("event=cut_off" in line for line in process.stderr)
        assert caller.is_healthy()
        ends_well(process)


def test_unusual_requests_are_passed_on(start: Start, caller: Caller, model: Model) -> None:
    with start() as process:
        wait_until(caller.is_healthy)
        load(caller, "a", model("a"))
        with send(caller, "/models/a/x%20y?q=%20%c3%a9[]", "Connection: close") as connection:
            _, body = read_all(connection).split(b"\r\n\r\n", 1)
            assert json.loads(body)["path"] == "/x%20y?q=%20%c3%a9%5B%5D"
        headers = ("Connection: close", "Expect: 100-continue")
        with send(caller, "/models/a/no-content", *headers) as connection:
            answer = read_all(connection)
            assert b"HTTP/1.1 204" in answer, "the 204 follows 100 Continue"
            assert b"Content-Length" not in answer
        ends_well(process)


def test_a_disconnect_aborts_the_request(start: Start, caller: Caller, model: Model) -> None:
    path = model("a")
    with start() as process:
        wait_until(caller.is_healthy)
        load(caller, "a", path)
        with send(caller, "/models/a/wait"):
            wait_until((path / "waits").exists)
            assert not (path / "gone").exists()
        wait_until((path / "gone").exists)
        ends_well(process)


def test_a_stream_of_a_crashed_model_is_cut_off(start: Start, caller: Caller, model: Model) -> None:
    with start() as process:
        wait_until(caller.is_healthy)
        load(caller, "a", model("a"))
        with send(caller, "/models/a/stream") as connection:
            read_until(connection, b"first\n\r\n")
            assert ask(caller, "POST", "/models/a/crash")[0] == 503
            assert connection.recv(4096) == b"", "the stream ends without its last chunk"
        assert caller.is_healthy()
        ends_well(process)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_may_finish(
    start: Start, caller: Caller, model: Model, short_dir: Path, signum: signal.Signals
) -> None:
    path = model("a")
    with start() as process:
        wait_until(caller.is_healthy)
        load(caller, "a", path)
        load(caller, "b", model("b"))
        with send(caller, "/models/a/stream") as connection, send(caller, "/ping") as idle:
            read_until(connection, b"first\n\r\n")
            read_until(idle, b"}\n")
            # As Ctrl-C in a terminal does, signal the process group. The models are not in it.
            os.killpg(process.pid, signum)
            wait_until(lambda: caller.ping() is None)
            assert process.poll() is None
            (path / "end").write_text("last\n")
            read_until(connection, b"0\r\n\r\n")
            assert process.wait(HANG_S) == 0
        output, errors = process.communicate()
    assert list(short_dir.iterdir()) == []
    assert "Traceback" not in errors
    assert "stopping: running requests may finish" in output


def test_stopping_while_a_model_unloads(start: Start, caller: Caller, model: Model) -> None:
    """The model has already got a signal to stop; a second one would kill its requests."""
    path = model("a")
    with start() as process, ThreadPoolExecutor(1) as pool:
        wait_until(caller.is_healthy)
        load(caller, "a", path)
        with send(caller, "/models/a/stream") as connection:
            read_until(connection, b"first\n\r\n")
            unloading = pool.submit(ask, caller, "DELETE", "/models/a")
            wait_until(lambda: b"UNLOADING" in ask(caller, "GET", "/models")[1])
            wait_until(lambda: (path / "asked").exists())
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: caller.ping() is None)
            (path / "end").write_text("last\n")
            read_until(connection, b"0\r\n\r\n")
        assert unloading.result()[0] == 200
        assert process.wait(HANG_S) == 0


def test_a_second_signal_stops_at_once(start: Start, caller: Caller, model: Model) -> None:
    with start() as process:
        wait_until(caller.is_healthy)
        load(caller, "a", model("a"))
        with send(caller, "/models/a/stream") as connection:
            read_until(connection, b"first\n\r\n")
            process.send_signal(signal.SIGINT)
            wait_until(lambda: caller.ping() is None)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == 0


def test_models_die_with_the_server(start: Start, caller: Caller, model: Model) -> None:
    with start() as process:
        wait_until(caller.is_healthy)
        load(caller, "a", model("a"))
        pids = descendants(process.pid)
        assert len(pids) == 1
        process.kill()
        process.wait()
        wait_until(lambda: all(map(is_gone, pids)))


def test_stopping_while_a_model_loads(start: Start, caller: Caller, model: Model) -> None:
    body = {"model_name": "a", "url": str(model("a", "never-ready"))}
    with start() as process, ThreadPoolExecutor(1) as pool:
        wait_until(caller.is_healthy)
        loading = pool.submit(ask, caller, "POST", "/models", body)
        wait_until(lambda: descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        status, answer = loading.result()
    assert (status, json.loads(answer)["error"]) == (503, "the server is stopping")


def test_the_server_is_not_healthy_before_its_store_is_loaded(
    start: Start, caller: Caller, model: Model, tmp_path: Path
) -> None:
    model("a")
    model("b")
    with start(tmp_path / "store"):
        wait_until(caller.is_healthy)
        assert json.loads(ask(caller, "POST", "/models/b/invoke")[1])["name"] == "b"
        assert ask(caller, "DELETE", "/models/a")[0] == 200


def test_a_store_with_a_model_that_fails_to_load(
    start: Start, caller: Caller, model: Model, tmp_path: Path
) -> None:
    for name, mode, code in (("b", "refuse", 2), ("c", "short", 3)):
        model("a" + name)
        path = model(name, mode)
        with start(tmp_path / "store") as process:
            _, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == code
        assert f"longshore: model '{name}' cannot be loaded: " in errors
        assert "Traceback" not in errors
        (path / "mode").write_text("well")


def test_stopping_while_a_store_loads(
    start: Start, caller: Caller, model: Model, tmp_path: Path
) -> None:
    model("a", "never-ready")
    model("b")
    with start(tmp_path / "store") as process:
        wait_until(lambda: descendants(process.pid))
        assert caller.ping() == 503
        ends_well(process)


def test_stopping_while_a_model_is_unpacked(
    caller: Caller, model: Model, tmp_path: Path, short_dir: Path
) -> None:
    """The thread that unpacks cannot be stopped, so nothing may wait for it."""
    model("a")
    model("b")
    program = (
        "import time; import container.multi_model.model_registry as models; "
        "from tests.container.multi_model.run_models import main; "
        "models.estimate_needs = lambda *_: (print('unpacking', flush=True), time.sleep(1000)); "
        f"main('{caller.port}', {str(tmp_path / 'store')!r})"
    )
    with running_alone(["-c", program], short_dir) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "unpacking\n":
            assert process.poll() is None
        ends_well(process)


def test_port_in_use(start: Start, caller: Caller) -> None:
    with start() as process:
        wait_until(caller.is_healthy)
        with start() as second:
            _, errors = second.communicate(timeout=HANG_S)
        assert process.poll() is None
    assert second.returncode == 2
    assert f"port {caller.port}: Address already in use" in errors
