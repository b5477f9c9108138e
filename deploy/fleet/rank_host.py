"""The ranks of a replica that are on other nodes than its container."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import secrets
import socket
import time
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from container.launch.children import Child
from core.configuration.meeting_point import MeetingPoint
from core.process.names import python_command
from deploy.fleet.container_process import child_arguments, with_key

_POLL_INTERVAL_S = 0.1


class RanksEndedError(Exception):
    """The ranks on another node have ended."""


class RankHost:
    """The Ray actor that runs the ranks of one bundle. The ranks die with the actor."""

    def run(self, properties: str, cpus: float, nodes: int, place: MeetingPoint) -> str:
        """Run the ranks. If they end by themselves, return how."""
        arguments = child_arguments(Path(properties), cpus, nodes, place)
        command = [*python_command("deploy.fleet.child"), "join", *arguments]
        child = Child("ranks", command, variables=with_key(place))
        while child.exit_code is None:
            time.sleep(_POLL_INTERVAL_S)
        return child.describe_exit()


class OtherNodes:
    """The actors in all bundles of a placement group but the first, which is the replica's own."""

    def __init__(self, group: PlacementGroup, properties: str, cpus: float) -> None:
        """Start the actors. Their ranks wait for the container at `place`."""
        self._reserved = _reserve_port(ray.util.get_node_ip_address())
        host, port = self._reserved.getsockname()
        self.place = MeetingPoint(host, port, secrets.token_hex(32).encode())
        self.num_nodes = group.bundle_count
        actor = ray.remote(RankHost)
        self._hosts = [
            actor.options(
                num_cpus=cpus,
                num_gpus=group.bundle_specs[bundle].get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=bundle
                ),
            ).remote()
            for bundle in range(1, self.num_nodes)
        ]
        self._runs = [
            host.run.remote(properties, cpus, self.num_nodes, self.place) for host in self._hosts
        ]

    async def wait_until_ended(self) -> None:
        """Wait for the end of any of these actors. Raises RanksEndedError then."""
        runs = [asyncio.wrap_future(run.future()) for run in self._runs]
        done, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        error = first.exception()
        how = first.result() if error is None else f"were lost: {type(error).__name__}"
        raise RanksEndedError(f"the ranks on another node {how}; see their log")

    def stop(self) -> None:
        """End all actors."""
        for host in self._hosts:
            ray.kill(host)
        self._reserved.close()


def _reserve_port(host: str) -> socket.socket:
    """Return a socket bound to a port that the kernel gives to nobody else while it is open.

    Rank 0 can still listen on that port, because it sets SO_REUSEADDR too.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved
