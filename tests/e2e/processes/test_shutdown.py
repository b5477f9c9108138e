"""Stops and deaths under load: how requests end, and that no process or file is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.container.processes import (
    HANG_S,
    Caller,
    children,
    descendants,
    free_port,
    is_gone,
    running_alone,
    wait_until,
)
from tests.e2e.serving import (
    DEMO,
    IMAGE,
    LONG_ANSWER,
    Container,
    is_engine,
    long_winded,
    serve,
)
from tests.harm.endings import Clients, count
from tests.harm.kills import run_kills

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
ANSWERED = "vllm:request_success_total"

pytestmark = pytest.mark.skipif(bool(IMAGE), reason="signals processes of the checkout")


@pytest.mark.parametrize(
    ("batching", "max_new_tokens"),
    [
        pytest.param("none", 60, marks=pytest.mark.matrix(cases=0)),
        pytest.param("dynamic", 150, marks=pytest.mark.matrix(cases=0)),
        ("paged", 240),
    ],
)
def test_sigterm_under_50_streams_and_20_whole_requests(
    tmp_path: Path, short_dir: Path, batching: str, max_new_tokens: int
) -> None:
    """All requests are answered or, on a machine too slow for that, get an error with a reason.

    The answers are so long that a quick machine cannot give them all before the last request comes.
    """
    properties = f"option.batching={batching}\nbatch_size=16\noption.dtype=fp32\n"
    with serve(tmp_path, properties, TMPDIR=str(short_dir)) as container:
        clients = Clients(
            container.port, num_streams=50, num_whole=20, max_new_tokens=max_new_tokens
        )

        def all_have_arrived_and_some_are_unfinished() -> bool:
            running, waiting, answered = container.metrics(RUNNING, WAITING, ANSWERED)
            return running + waiting + answered == 70 and answered < 70

        wait_until(all_have_arrived_and_some_are_unfinished)
        assert container.stop(signal.SIGTERM) == 0
        endings = clients.wait(HANG_S)
    kinds = count(endings)
    assert kinds["cut"] == 0, [ending for ending in endings if ending.kind == "cut"][:3]
    assert kinds["answered"] + kinds["error"] == 70
    assert kinds["answered"] > 0
    reasons = {ending.detail for ending in endings if ending.kind == "error"}
    assert reasons <= {"the server is stopping"}
    assert list(short_dir.iterdir()) == []


SLOW_FORMATTER = """
import pathlib, subprocess, time
from djl_python.input_parser import input_formatter

@input_formatter
def parse(inputs):
    return inputs

subprocess.Popen(["sleep", "1000"])
pathlib.Path("imported").touch()
time.sleep(1000)
"""


def is_imported(model: Path, server: int, port: int) -> bool:
    """Return whether the process that checks the formatter is in its midst."""
    return (model / "imported").exists()


def is_loading(model: Path, server: int, port: int) -> bool:
    """Return whether the engine's process runs. It needs seconds to be ready."""
    return any(map(is_engine, descendants(server)))


def is_serving(model: Path, server: int, port: int) -> bool:
    return Caller(port).is_healthy()


UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
BECOME = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


def unshare_is_permitted() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("is_process_1", [True, False])
@pytest.mark.parametrize("moment", [is_imported, is_loading, is_serving])
def test_a_signal_at_any_moment_of_a_start(
    tmp_path: Path,
    short_dir: Path,
    moment: Callable[[Path, int, int], bool],
    is_process_1: bool,
) -> None:
    """Process 1, as in a container, does not even notice a signal that it has not asked for."""
    if is_process_1 and not unshare_is_permitted():
        pytest.skip("unshare may not create a process 1 here")
    model, port = shutil.copytree(DEMO, tmp_path / "model"), free_port()
    if moment is is_imported:
        (model / "model.py").write_text(SLOW_FORMATTER)
    prefix = UNSHARE if is_process_1 else ()
    serve = (sys.executable, "-m", "longshore", "serve", str(model), "--port", str(port))
    arguments = ["-c", BECOME, *prefix, *serve]
    with running_alone(arguments, short_dir, OMP_NUM_THREADS="1") as process:
        wait_until(lambda: not is_process_1 or children(process.pid))
        server = children(process.pid)[0] if is_process_1 else process.pid
        wait_until(lambda: moment(model, server, port))
        started = descendants(server)
        container = Container(process, port, tmp_path / "log")
        with ExitStack() as opened:
            streams = [
                opened.enter_context(container.stream("ROMEO:", max_new_tokens=800))
                for _ in range(4 if moment is is_serving else 0)
            ]
            for lines in streams:
                next(lines)
            os.kill(server, signal.SIGTERM)
            last = [list(lines)[-1] for lines in streams]
        output, errors = process.communicate(timeout=HANG_S)
        wait_until(lambda: all(map(is_gone, started)))
    assert process.returncode == 0
    assert started
    assert "Traceback" not in errors
    assert all("generated_text" in line for line in last)
    # Not always the last line: the engine writes to the same file until it hears of the stop.
    assert any(line.startswith("stopp") for line in output.splitlines())
    assert list(short_dir.iterdir()) == []


@pytest.mark.matrix(cases=0)
def test_a_second_signal_stops_at_once(tmp_path: Path, short_dir: Path) -> None:
    """Running requests are cut off without an error, which they would get after one signal."""
    with serve(tmp_path, model=long_winded(tmp_path), TMPDIR=str(short_dir)) as container:
        clients = Clients(container.port, num_streams=10, num_whole=2, max_new_tokens=LONG_ANSWER)
        wait_until(lambda: container.metric(RUNNING, WAITING) == 12)
        container.process.send_signal(signal.SIGINT)
        wait_until(lambda: "repeat the signal" in container.log)
        container.process.send_signal(signal.SIGTERM)
        assert container.process.wait(HANG_S) == 0
        assert count(clients.wait(HANG_S)) == {"cut": 12}
    assert list(short_dir.iterdir()) == []


@pytest.mark.matrix(cases=0)
def test_a_frozen_engine_is_noticed_and_the_container_recovers_when_it_goes_on(
    tmp_path: Path,
) -> None:
    """SIGSTOP acts like a suspended machine: no more heartbeats, but the process does not end."""
    with serve(tmp_path, model=long_winded(tmp_path)) as container:
        clients = Clients(container.port, num_streams=4, num_whole=2, max_new_tokens=LONG_ANSWER)
        wait_until(lambda: container.metric(RUNNING, WAITING) == 6)
        engine = container.engine
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_until(lambda: container.request("GET", "/ping")[0] == 503)
            endings = clients.wait(HANG_S)
            status, _ = container.request("POST", "/invocations", {"inputs": "ROMEO:"})
        finally:
            os.kill(engine, signal.SIGCONT)
        assert count(endings) == {"error": 6}, endings
        assert status == 503
        wait_until(lambda: container.request("GET", "/ping")[0] == 200)
        wait_until(lambda: container.metric(RUNNING, WAITING) == 0)
        assert container.invoke("ROMEO:", max_new_tokens=4)["generated_text"]
        assert container.stop() == 0


@pytest.mark.matrix(cases=0)
def test_kill_9_of_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead engine is replaced, and its clients get an error; a dead supervisor leaves no process.

    One request runs at a time, so that some are unfinished when the kill comes.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one_at_a_time = {"option.batching": "none"}
    found = run_kills(3, one_at_a_time, model_dir=DEMO, seed=0, folder=tmp_path)
    kills = {kill.target: kill for kill in found}
    assert kills.keys() == {"engine", "worker", "supervisor"}
    engine = count(kills["engine"].endings)
    assert engine["cut"] == 0, kills["engine"].endings
    assert engine["error"] > 0
    assert kills["engine"].recovery_s is not None
    assert kills["worker"].recovery_s is not None
    assert kills["supervisor"].num_processes_left == 0
