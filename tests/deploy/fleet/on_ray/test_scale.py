"""The number of replicas follows the requests, or the command, and no stream is lost."""

from __future__ import annotations

from pathlib import Path

from tests.container.processes import wait_until
from tests.deploy.fleet.load import Load
from tests.deploy.fleet.on_ray.conftest import START_S, demo, running_fleet

RUNNING = "vllm:num_requests_running"


def test_replicas_come_with_the_requests_and_leave_without_a_loss(tmp_path: Path):
    text = f"{demo('paged')}option.max_rolling_batch_size=2\n"
    scale = ("--autoscale", "1:2", "--cpus", "0.5")
    with running_fleet(tmp_path, text, *scale) as fleet:
        assert len(fleet.metric(RUNNING)) == 1
        load = Load(fleet.port, num_clients=5, num_tokens=40)
        with load.running():
            wait_until(lambda: len(fleet.metric(RUNNING)) == 2, START_S)
            load.wait_for(10)
            update = fleet.update(text, "--replicas", "1", "--cpus", "0.5")
            assert update.wait(START_S) == 0
            load.wait_for(5)
        assert not load.failures
        assert len(fleet.metric(RUNNING)) == 1
