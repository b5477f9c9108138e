"""Stops and deaths under load: every stream ends with a last record, and nothing is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from loadtest.endings import Clients, count
from loadtest.kills import run_kills
from tests.container.processes import wait_until
from tests.e2e.serving import DEMO, IMAGE, serve

AT_ONCE_S = 15.0
"""On a busy machine. Running requests would get 26 s."""
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
ANSWERED = "vllm:request_success_total"

pytestmark = pytest.mark.skipif(bool(IMAGE), reason="signals processes of the checkout")


@pytest.mark.parametrize(
    ("batching", "max_new_tokens"), [("none", 20), ("dynamic", 60), ("paged", 120)]
)
def test_sigterm_under_50_streams_and_20_whole_requests(
    tmp_path: Path, short_dir: Path, batching: str, max_new_tokens: int
) -> None:
    """All are answered, or, on a machine too slow for that, told why not."""
    properties = f"option.batching={batching}\nbatch_size=16\noption.dtype=fp32\n"
    with serve(tmp_path, properties, TMPDIR=str(short_dir)) as it:
        clients = Clients(it.port, num_streams=50, num_whole=20, max_new_tokens=max_new_tokens)
        counts: list[float] = []

        def all_have_arrived() -> bool:
            counts[:] = it.metrics(RUNNING, WAITING, ANSWERED)
            return sum(counts) == 70

        wait_until(all_have_arrived)
        assert counts[0] > 0
        assert it.stop(signal.SIGTERM) == 0
        endings = clients.wait(5.0)
    kinds = count(endings)
    assert kinds["cut"] == 0, [ending for ending in endings if ending.kind == "cut"][:3]
    assert kinds["answered"] + kinds["told"] == 70
    assert kinds["answered"] > 0
    told = {ending.detail for ending in endings if ending.kind == "told"}
    assert told <= {"the server is stopping"}
    assert list(short_dir.iterdir()) == []


def test_a_second_signal_stops_at_once(tmp_path: Path, short_dir: Path) -> None:
    with serve(tmp_path, TMPDIR=str(short_dir)) as it:
        clients = Clients(it.port, num_streams=10, num_whole=2, max_new_tokens=900)
        wait_until(lambda: it.metric(RUNNING, WAITING) == 12)
        it.process.send_signal(signal.SIGINT)
        wait_until(lambda: "repeat the signal" in it.log)
        it.process.send_signal(signal.SIGTERM)
        assert it.process.wait(AT_ONCE_S) == 0
        assert count(clients.wait(5.0))["answered"] == 0
    assert list(short_dir.iterdir()) == []


def test_a_frozen_engine_is_noticed_and_the_container_recovers_when_it_goes_on(
    tmp_path: Path,
) -> None:
    """As if the machine were suspended: no heartbeat, no end of the process."""
    with serve(tmp_path) as it:
        clients = Clients(it.port, num_streams=4, num_whole=2, max_new_tokens=900)
        wait_until(lambda: it.metric(RUNNING, WAITING) == 6)
        engine = it.engine
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_until(lambda: it.request("GET", "/ping")[0] == 503)
            endings = clients.wait(20.0)
            status, _ = it.request("POST", "/invocations", {"inputs": "ROMEO:"})
        finally:
            os.kill(engine, signal.SIGCONT)
        assert count(endings) == {"told": 6}, endings
        assert status == 503
        wait_until(lambda: it.request("GET", "/ping")[0] == 200)
        wait_until(lambda: it.metric(RUNNING, WAITING) == 0)
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
