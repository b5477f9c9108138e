"""Stops and deaths under load: how requests end, and that no process or file is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.container.processes import HANG_S, wait_until
from tests.e2e.serving import DEMO, IMAGE, LONG_ANSWER, long_winded, serve
from tests.harm.endings import Clients, count
from tests.harm.kills import run_kills

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
ANSWERED = "vllm:request_success_total"

pytestmark = pytest.mark.skipif(bool(IMAGE), reason="signals processes of the checkout")


@pytest.mark.parametrize(
    ("batching", "max_new_tokens"), [("none", 60), ("dynamic", 150), ("paged", 240)]
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
