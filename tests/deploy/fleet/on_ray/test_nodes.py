"""A replica whose ranks are on two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from core.process.names import import_root
from engine import LLM, SamplingParams
from tests.container.processes import ROOT, descendants, free_port, wait_until
from tests.deploy.fleet.load import Load
from tests.deploy.fleet.on_ray.conftest import START_S, FleetProcess, command_line, run_fleet

BODY = {"inputs": "ROMEO:", "parameters": {"max_new_tokens": 8}}
SPLIT = "option.nodes=2\noption.tensor_parallel_degree=2\noption.dtype=fp32\n"
RUNNING = "vllm:num_requests_running"
NOTICED_S = 10.0
"""The ranks notice in 3.5 s that one is lost; Ray then has to replace the replica's actor."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without room for ranks, and two nodes with room for one rank each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", f"{import_root()}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    settings = {"health_check_period_ms": 1000}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": settings}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)


def rank_1_of(node: Any) -> list[int]:
    """Return the processes of rank 1 on a node; none if it has rank 0."""
    return [pid for pid in processes_of(node) if b"engine.follow" in command_line(pid)]


def replicas(fleet: FleetProcess) -> list[str]:
    try:
        return [*fleet.metric(RUNNING)]
    except urllib.error.HTTPError:  # there is none
        return []


def is_join(command: bytes) -> bool:
    return b"deploy.fleet.child" in command and b"\0join\0" in command


def processes_of(node: Any) -> list[int]:
    [raylet] = (info.process.pid for info in node.all_processes["raylet"])
    return [raylet, *descendants(raylet)]


def kill(node: Any) -> None:
    """Kill all processes of a node at once."""
    for pid in processes_of(node):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def serve(cluster: Any, properties: Path, port: int) -> subprocess.Popen[bytes]:
    arguments = ["serve", "--address", cluster.address, "--port", str(port), "--cpus", "1"]
    arguments += ["--surge", "0", "--properties", str(properties)]
    return run_fleet(arguments, properties.parent / "log")


def test_a_replica_on_two_nodes_answers_as_one_rank_and_outlives_a_node(
    cluster: Any, tmp_path: Path
) -> None:
    nodes = [add_node(cluster), add_node(cluster)]
    model, properties, port = ROOT / "models" / "demo", tmp_path / "serving.properties", free_port()
    properties.write_text(f"option.model_id={model}\n{SPLIT}")
    deploying = serve(cluster, properties, port)
    fleet = FleetProcess(deploying, port, properties, tmp_path / "log")
    assert deploying.wait(START_S) == 0, fleet.log.read_text()[-5000:]
    assert "each replica takes 2 nodes" in fleet.log.read_text()
    with LLM(model, dtype="fp32") as llm:
        [output] = llm.generate(["ROMEO:"], SamplingParams(temperature=0, max_tokens=8))
    assert fleet.post(BODY)["generated_text"] == output.outputs[0].text
    joined = [rank_1_of(node) for node in nodes]
    assert sorted(map(len, joined)) == [0, 1], "rank 0 is on one node and rank 1 on the other"

    load = Load(port, num_clients=2, num_tokens=200)
    with load.running():
        load.wait_for(2)
        begun = len(load.outcomes)
        kill(nodes[joined.index(max(joined))])
        wait_until(lambda: len(load.outcomes) >= begun + 2, NOTICED_S)
        failures = load.outcomes[begun : begun + 2]
        # No replica has room until there is a second node again. Then requests are answered again.
        add_node(cluster)
        wait_until(lambda: load.outcomes[-1].kind == "complete", START_S)
    assert {outcome.kind for outcome in failures} <= {"cut", "refused", "unreachable"}, failures
    assert fleet.post(BODY)["generated_text"] == output.outputs[0].text

    old = replicas(fleet)
    assert len(old) == 1
    [joined_ranks] = [pid for pid in descendants(os.getpid()) if is_join(command_line(pid))]
    os.kill(joined_ranks, signal.SIGKILL)
    wait_until(lambda: replicas(fleet) not in ([], old), START_S)
    assert fleet.post(BODY)["generated_text"] == output.outputs[0].text
