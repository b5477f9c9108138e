"""Stops and deaths under load: every stream ends with a last record, and nothing is left."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loadtest.endings import Clients, count
from loadtest.kills import run_kills
from loadtest.roles import by_role
from tests.container.processes import wait_until
from tests.e2e.serving import DEMO, IMAGE, Container, serve

STOP_S = 25.0
SLACK_S = 3.0
"""For the processes to end, on a busy machine."""

pytestmark = pytest.mark.skipif(bool(IMAGE), reason="signals processes of the checkout")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A TMPDIR of its own, short enough for the path of a Unix socket."""
    path = Path(tempfile.mkdtemp(prefix="ls-"))
    yield path
    shutil.rmtree(path)


def num_accepted(container: Container) -> float:
    """Return how many requests run or wait, by the server's own account."""
    status, data = container.request("GET", "/metrics")
    assert status == 200
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    lines = data.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def engine_of(container: Container) -> psutil.Process:
    root = psutil.Process(container.process.pid)
    (engine,) = by_role([root, *root.children(recursive=True)])["engine"]
    return engine


@pytest.mark.parametrize(
    ("batching", "max_new_tokens"),
    [("none", 120), ("dynamic", 60), ("continuous", 60), ("paged", 60)],
)
def test_sigterm_under_50_streams_and_20_whole_requests(
    tmp_path: Path, scratch: Path, batching: str, max_new_tokens: int
) -> None:
    """With `none` most of them cannot end in time; they are told so."""
    properties = f"option.batching={batching}\nbatch_size=16\noption.dtype=fp32\n"
    with serve(tmp_path, properties, TMPDIR=str(scratch)) as it:
        clients = Clients(it.port, num_streams=50, num_whole=20, max_new_tokens=max_new_tokens)
        wait_until(lambda: num_accepted(it) == 70)
        began = time.monotonic()
        assert it.stop(signal.SIGTERM) == 0
        stopped_s = time.monotonic() - began
        endings = clients.wait(5.0)
    kinds = count(endings)
    assert kinds["cut"] == 0, [ending for ending in endings if ending.kind == "cut"][:3]
    assert kinds["answered"] + kinds["told"] == 70
    assert kinds["answered"] > 0
    told = {ending.detail for ending in endings if ending.kind == "told"}
    assert told <= {"the server is stopping"}
    assert stopped_s < STOP_S + SLACK_S
    assert list(scratch.iterdir()) == []


def test_a_second_signal_stops_at_once(tmp_path: Path, scratch: Path) -> None:
    with serve(tmp_path, TMPDIR=str(scratch)) as it:
        clients = Clients(it.port, num_streams=10, num_whole=2, max_new_tokens=900)
        wait_until(lambda: num_accepted(it) == 12)
        it.process.send_signal(signal.SIGINT)
        wait_until(lambda: "repeat the signal" in it.log)
        began = time.monotonic()
        it.process.send_signal(signal.SIGTERM)
        assert it.process.wait(10) == 0
        assert time.monotonic() - began < SLACK_S
        clients.wait(5.0)
    assert list(scratch.iterdir()) == []


def test_a_frozen_engine_is_noticed_and_the_container_recovers_when_it_goes_on(
    tmp_path: Path,
) -> None:
    """As if the machine were suspended: no heartbeat, no end of the process."""
    with serve(tmp_path, "option.heartbeat_timeout=2\n") as it:
        engine = engine_of(it)
        clients = Clients(it.port, num_streams=4, num_whole=2, max_new_tokens=900)
        wait_until(lambda: num_accepted(it) == 6)
        engine.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: it.request("GET", "/ping")[0] == 503)
            endings = clients.wait(20.0)
            status, _ = it.request("POST", "/invocations", {"inputs": "ROMEO:"})
        finally:
            engine.send_signal(signal.SIGCONT)
        assert count(endings) == {"told": 6}, endings
        assert status == 503
        wait_until(lambda: it.request("GET", "/ping")[0] == 200)
        wait_until(lambda: num_accepted(it) == 0)
        assert it.invoke("ROMEO:", max_new_tokens=4)["generated_text"]
        assert it.stop() == 0


def test_kill_9_of_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead engine is replaced and every client told; a dead supervisor leaves no process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kills = {
        kill.target: kill for kill in run_kills(3, {}, model_dir=DEMO, seed=0, folder=tmp_path)
    }
    assert kills.keys() == {"engine", "worker", "supervisor"}
    engine = count(kills["engine"].endings)
    assert engine["cut"] == 0, kills["engine"].endings
    assert engine["told"] > 0
    assert kills["engine"].recovery_s is not None
    assert kills["worker"].recovery_s is not None
    assert kills["supervisor"].num_processes_left == 0
