"""The supervisor with real processes: start, stop, restart and cleanup."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.container.processes import (
    Caller,
    descendants,
    is_gone,
    running_alone,
    wait_until,
)

Start = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def start(tokenizer_dir: Path, caller: Caller, short_dir: Path) -> Start:
    """Start a supervisor whose fake engine has this mode."""

    def start(mode: str, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
        arguments = [str(tokenizer_dir), str(caller.port), mode]
        command = ["-m", "tests.container.run_supervisor", *arguments]
        return running_alone(command, short_dir, **variables)

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
        # Like Ctrl-C in a terminal: to the process group, which does not include the children.
        os.killpg(process.pid, signum)
        assert process.wait(10) == 0
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
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 3, "only the kernel kills a loading engine: out of memory"
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
        os.kill(engine, signal.SIGKILL)  # the second time
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors.count("restarting the engine") == 1


def test_an_engine_with_a_configuration_error_is_not_restarted(start: Start) -> None:
    with start("refuse", SERVING_RETRY_THRESHOLD="3") as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "restarting" not in errors


def test_an_engine_that_is_never_ready_times_out(start: Start) -> None:
    with start("never-ready", OPTION_MODEL_LOADING_TIMEOUT="1") as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "engine not ready after 1 s (option.model_loading_timeout)" in errors


def test_children_die_with_a_killed_supervisor(start: Start, caller: Caller) -> None:
    with start("well") as process:
        wait_until(caller.is_healthy)
        pids = descendants(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: all(map(is_gone, pids)), 5)


def test_a_second_signal_stops_at_once(start: Start, caller: Caller) -> None:
    with start("stalls") as process:
        wait_until(caller.is_healthy)
        with caller.open({"inputs": "Q", "stream": True}) as connection:
            assert connection.recv(1) == b"H"
            process.send_signal(signal.SIGINT)
            wait_until(lambda: caller.ping() is None)
            assert process.poll() is None
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(5) == 0
            assert time.monotonic() - began < 2


def test_port_in_use(start: Start, caller: Caller) -> None:
    with start("well") as process:
        wait_until(caller.is_healthy)
        with start("well") as second:
            _, errors = second.communicate(timeout=20)
        assert process.poll() is None
    assert f"port {caller.port}: Address already in use" in errors
