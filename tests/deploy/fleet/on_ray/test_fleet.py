"""A fleet looks like one container to its clients, also while it is updated and while parts of it
die.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.container.processes import wait_until
from tests.deploy.fleet.load import Load
from tests.deploy.fleet.on_ray.conftest import SCALE, START_S, FleetProcess, demo

PREFIX = "All the world's a stage, and all the men and women merely players. " * 12
RUNNING = "vllm:num_requests_running"


def replicas(fleet: FleetProcess) -> set[str]:
    return set(fleet.metric(RUNNING))


def test_both_replicas_answer_behind_one_port(fleet: FleetProcess):
    assert json.loads(fleet.get("/ping")) == {"status": "healthy"}
    assert len(replicas(fleet)) == 2
    body = {"inputs": "ROMEO:", "parameters": {"max_new_tokens": 4}}
    assert len({json.dumps(fleet.post(body)) for _ in range(8)}) == 1


@contextmanager
def posted(fleet: FleetProcess, body: object) -> Iterator[http.client.HTTPResponse]:
    """The response to a request, whose connection closes at the end of the block."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=60)
    connection.request("POST", "/invocations", json.dumps(body))
    response = connection.getresponse()
    try:
        yield response
    finally:
        response.close()
        connection.close()


def num_running(fleet: FleetProcess) -> float:
    """Return the number of running sequences, as of the engines' last heartbeats."""
    return sum(fleet.metric(RUNNING).values())


def long_stream() -> dict[str, object]:
    parameters = {"max_new_tokens": 900, "min_new_tokens": 900}
    return {"inputs": "ROMEO:", "parameters": parameters, "stream": True}


def test_errors_are_the_containers(fleet: FleetProcess):
    with posted(fleet, {"inputs": 5}) as response:
        assert response.status == 400
        assert json.loads(response.read())["field"] == "inputs"


def test_tokens_pass_as_they_come(fleet: FleetProcess):
    with posted(fleet, long_stream()) as response:
        assert response.readline()
        wait_until(lambda: num_running(fleet) == 1)  # the first token is here before the last
        assert sum(1 for _ in response) == 899


def test_a_client_that_leaves_frees_its_blocks(fleet: FleetProcess):
    def num_aborted() -> float:
        name = "vllm:request_success_total"
        return sum(fleet.metric(name, finished_reason="abort").values())

    before = num_aborted()
    with posted(fleet, long_stream()) as response:
        response.readline()
        wait_until(lambda: num_running(fleet) == 1)
    wait_until(lambda: num_aborted() == before + 1)


def test_prompts_with_one_beginning_go_to_one_replica(fleet: FleetProcess):
    name = "vllm:prefix_cache_hits_total"
    before = fleet.metric(name)
    for place in range(6):
        fleet.post({"inputs": f"{PREFIX}{place}", "parameters": {"max_new_tokens": 2}})
    gains = [value - before[replica] for replica, value in fleet.metric(name).items()]
    assert sorted(gains)[0] == 0
    assert sorted(gains)[1] > 0


def test_an_update_under_load_loses_nothing(fleet: FleetProcess):
    load = Load(fleet.port, num_clients=3, num_tokens=16)
    old = replicas(fleet)
    with load.running():
        load.wait_for(5)
        update = fleet.update(demo("continuous"))
        assert update.wait(START_S * 2) == 0
        load.wait_for(5)
    assert not load.failures
    assert not replicas(fleet) & old
    assert 'batching="continuous"' in fleet.get("/metrics")


def test_an_update_that_cannot_start_leaves_the_fleet_as_it_was(fleet: FleetProcess):
    load = Load(fleet.port, num_clients=1, num_tokens=16)
    old = replicas(fleet)
    with load.running():
        update = fleet.update(f"{demo('paged')}option.kv_cache_memory_bytes=1\n")
        assert update.wait(START_S * 2) == 2
        load.wait_for(2)
        assert replicas(fleet) == old
        assert "deploy the former properties again" in fleet.log.read_text()
        assert fleet.update(demo("continuous")).wait(START_S * 2) == 0
    assert not load.failures
    assert not replicas(fleet) & old


def test_a_port_of_a_running_fleet_does_not_change(fleet: FleetProcess):
    update = fleet.update(demo("continuous"), *SCALE, "--port", "8123")
    assert update.wait(60) == 2
    assert "--port 8123: a fleet is running" in fleet.log.read_text()


def test_a_killed_container_costs_its_own_requests_only(fleet: FleetProcess):
    load = Load(fleet.port, num_clients=4, num_tokens=40)
    old = replicas(fleet)
    with load.running():
        load.wait_for(4)
        os.kill(fleet.processes(b"deploy.fleet.child")[0], signal.SIGKILL)
        wait_until(lambda: len(replicas(fleet) - old) == 1, START_S)
        load.wait_for(4)
    assert len(load.failures) <= 4
    assert {outcome.kind for outcome in load.failures} <= {"cut"}, load.failures


def test_a_killed_node_costs_the_requests_on_it_only(fleet: FleetProcess):
    load = Load(fleet.port, num_clients=4, num_tokens=40)
    with load.running():
        load.wait_for(4)
        fleet.kill_a_node()
        load.wait_for(20)
        num_failures = len(load.failures)
        load.wait_for(8)
    assert num_failures == len(load.failures), "requests fail only at the time of the kill"
    # A client may connect to the node once more while it dies.
    assert num_failures <= 8, load.failures
    assert {outcome.kind for outcome in load.failures} <= {"cut", "unreachable", "refused"}
    refused = [outcome.detail for outcome in load.failures if outcome.kind == "refused"]
    # Until Ray knows that a replica is dead, all tries of a request may go to it. If the gateway
    # was on the killed node, too, Serve's proxy answers.
    allowed = ("503 ", "500 b'Internal Server Error'")
    assert all(detail.startswith(allowed) for detail in refused), refused
