"""The supervisor with real processes: start, stop, restart and cleanup."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.container.processes import (
    HANG_S,
    Caller,
    descendants,
    is_gone,
    running_alone,
    wait_until,
)

Start = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def start(tokenizer_dir: Path, caller: Caller, short_dir: Path) -> Start:
    """Return a function that starts a supervisor. Its fake engine runs in the given mode."""

    def start(mode: str, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
        arguments = [str(tokenizer_dir), str(caller.port), mode]
        command = ["-m", "tests.container.launch.run_supervisor", *arguments]
        return running_alone(command, short_dir, OPTION_HTTP_WORKERS="1", **variables)

    return start


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_supervisor_serves_until_it_is_stopped(
    start: Start, caller: Caller, short_dir: Path, signum: signal.Signals
) -> None:
    with start("well") as process:
        wait_until(caller.is_healthy)
        assert caller.post({"inputs": "Q"})[0] == 200
        pids = descendants(process.pid)
        assert len(pids) == 3  # engine, gunicorn and its worker
        # As Ctrl-C in a terminal does, signal the process group. The children are not in it.
        os.killpg(process.pid, signum)
        assert process.wait(HANG_S) == 0
        assert all(map(is_gone, pids))
        assert list(short_dir.iterdir()) == []
        output, errors = process.communicate()
    assert errors == ""
    assert f"Longshore on port {caller.port}" in output
    assert output.count("ready: fake (Fake) loaded in 0.1 s") == 1
    assert "layout: 1 copy x 1 rank on cpu" in output
    assert "KV 2.0 MiB = 40 blocks of 16 tokens" in output
    assert "note: a note" in output
    assert f"listening on http://localhost:{caller.port}\n" in output.splitlines(keepends=True)


def test_an_engine_killed_while_loading_stops_the_supervisor(start: Start, short_dir: Path) -> None:
    with start("crash") as process:
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 3, "SIGKILL while loading counts as out of memory"
    assert "engine was killed by SIGKILL" in errors
    assert list(short_dir.iterdir()) == []


def test_a_dead_engine_is_restarted(start: Start) -> None:
    with start("crash-once", SERVING_RETRY_THRESHOLD="1") as process:
        next(line for line in process.stdout if line.startswith("ready: "))
        engine = next(
            pid
            for pid in descendants(process.pid)
            if b"fake_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(engine, signal.SIGKILL)  # its second crash; the first was while it loaded
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert errors.count("restarting the engine") == 1


def kill_engine(process: subprocess.Popen[str], copy: int) -> None:
    for pid in descendants(process.pid):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"tests.container.fake_engine" in arguments and arguments[-2] == str(copy).encode():
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"copy {copy} has no engine")


def wait_for_lines(process: subprocess.Popen[str], *expected: str) -> str:
    """Read the output until all these lines have come, and return it."""
    assert process.stdout is not None
    output, left = "", set(expected)
    while left:
        line = process.stdout.readline()
        assert line, output
        output += line
        left.discard(line.rstrip("\n"))
    return output


BOTH_READY = ("engine of copy 0 is ready", "engine of copy 1 is ready")


def test_copies_have_an_engine_each(start: Start, caller: Caller, short_dir: Path) -> None:
    with start("well", OPTION_COPIES="2", OPTION_DEVICE="cpu") as process:
        output = wait_for_lines(process, *BOTH_READY)
        assert "    copy 1: rank 0 on the CPU, " in output
        assert "layout: 2 copies x 1 rank on cpu" in output
        assert output.count("ready: fake (Fake)") == 1
        wait_until(caller.is_healthy)
        assert caller.post({"inputs": "Q"})[0] == 200
        assert len(descendants(process.pid)) == 4  # two engines, gunicorn and its worker
        process.terminate()
        assert process.wait(HANG_S) == 0
        assert list(short_dir.iterdir()) == []


def test_without_restarts_the_container_serves_until_its_last_copy_is_lost(
    start: Start, caller: Caller
) -> None:
    with start("well", OPTION_COPIES="2", OPTION_DEVICE="cpu") as process:
        wait_for_lines(process, *BOTH_READY)
        wait_until(caller.is_healthy)
        kill_engine(process, 0)
        for _ in range(5):
            assert caller.post({"inputs": "Q"})[0] in (200, 424)
        wait_until(lambda: len(descendants(process.pid)) == 3)
        assert caller.post({"inputs": "Q"})[0] == 200
        assert process.poll() is None
        kill_engine(process, 1)
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "engine of copy 0 was killed by SIGKILL" in errors
    assert "engine of copy 0 stays down, engines_left=1" in errors
    assert "engine of copy 1 stays down" not in errors


def test_each_copy_has_its_own_restarts(start: Start) -> None:
    variables = {"OPTION_COPIES": "2", "OPTION_DEVICE": "cpu", "SERVING_RETRY_THRESHOLD": "1"}
    with start("well", **variables) as process:
        wait_for_lines(process, *BOTH_READY)
        for copy in (0, 1):
            kill_engine(process, copy)
            wait_for_lines(process, f"engine of copy {copy} is ready")
        process.terminate()
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    for copy in (0, 1):
        assert f"restarting the engine of copy {copy}, restarts_left=0" in errors


@pytest.mark.parametrize(("mode", "code"), [("refuse-1", 2), ("crash-1", 3)])
def test_a_copy_that_cannot_start_ends_the_container(start: Start, mode: str, code: int) -> None:
    with start(mode, OPTION_COPIES="2", OPTION_DEVICE="cpu") as process:
        process.communicate(timeout=HANG_S)
    assert process.returncode == code


def test_too_many_copies_are_refused_before_anything_starts(start: Start) -> None:
    with start("well", OPTION_COPIES="999", OPTION_DEVICE="cpu") as process:
        output, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "option.copies=999 with 1 rank each needs 999 cores" in errors
    assert "Longshore on port" not in output


def test_an_engine_with_a_configuration_error_is_not_restarted(start: Start) -> None:
    with start("refuse", SERVING_RETRY_THRESHOLD="3") as process:
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 2
    assert "restarting" not in errors


def test_a_configuration_error_of_an_engine_that_has_served_is_not_final(
    start: Start, short_dir: Path
) -> None:
    """The reason may pass by itself: ranks of other machines may be missing for a while."""
    with start("refuse-second", SERVING_RETRY_THRESHOLD="2") as process:
        next(line for line in process.stdout if line.startswith("ready: "))
        kill_engine(process, 0)
        wait_until(lambda: [path.stat().st_size for path in short_dir.glob("*/starts")] == [3])
        process.terminate()
        _, errors = process.communicate(timeout=HANG_S)
    assert "engine ended with exit code 2" in errors
    assert "restarting the engine, restarts_left=0" in errors


def test_an_engine_that_is_never_ready_times_out(start: Start) -> None:
    with start("never-ready", OPTION_MODEL_LOADING_TIMEOUT="1") as process:
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "engine is not ready after 1 s (option.model_loading_timeout)" in errors


def test_children_die_with_a_killed_supervisor(start: Start, caller: Caller) -> None:
    with start("well") as process:
        wait_until(caller.is_healthy)
        pids = descendants(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: all(map(is_gone, pids)))


def read_to_the_end(connection: socket.socket) -> bytes:
    """Return the data that arrive until the connection is closed or reset."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            data += part
    return data


def test_a_second_signal_stops_at_once(start: Start, caller: Caller) -> None:
    with start("stalls") as process:
        wait_until(caller.is_healthy)
        with caller.open({"inputs": "Q", "stream": True}) as connection:
            assert connection.recv(1) == b"H"
            process.send_signal(signal.SIGINT)
            wait_until(lambda: caller.ping() is None)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == 0
            rest = read_to_the_end(connection)
    assert b"the server is stopping" not in rest, "only a request whose time is up gets this error"


def test_port_in_use(start: Start, caller: Caller) -> None:
    with start("well") as process:
        wait_until(caller.is_healthy)
        with start("well") as second:
            _, errors = second.communicate(timeout=HANG_S)
        assert process.poll() is None
    assert f"port {caller.port}: Address already in use" in errors
