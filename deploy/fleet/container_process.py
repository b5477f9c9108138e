"""The container of a replica: its processes, and its health."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path

from container.launch.children import Child
from core.configuration.meeting_point import KEY_VARIABLE, MeetingPoint
from core.process.names import python_command
from deploy.fleet.exchange import fetch
from deploy.fleet.http_message import ReplicaLostError, Request

COMMAND = python_command("deploy.fleet.child")
_POLL_INTERVAL_S = 0.1
_PING_TIMEOUT_S = 2.0
_STOP_S = 5.0
"""How long a container without requests may take to end after SIGTERM."""


class ContainerEndedError(Exception):
    """The container has ended by itself."""


class ContainerProcess:
    """`longshore serve` on a Unix socket. It is killed together with this process."""

    def __init__(
        self,
        properties: Path,
        cpus: float = 1.0,
        nodes: int = 1,
        place: MeetingPoint | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """cpus: the cores that its ranks on this node share. nodes: how many nodes its ranks take.

        place: where its ranks on the other nodes join.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="longshore-fleet-"))
        self.socket = self._directory / "http"
        arguments = child_arguments(properties, cpus, nodes, place)
        self._child = Child(
            "container",
            [*command, "serve", *arguments, str(self.socket)],
            variables=with_key(place),
        )

    @property
    def has_ended(self) -> bool:
        return self._child.exit_code is not None

    async def wait_until_ready(self) -> None:
        """Wait until it answers requests. Raises ContainerEndedError if it ends before that.

        The container itself limits how long this may take (option.model_loading_timeout).
        """
        while not await self.is_ready():
            self.require_running()
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def wait_until_ended(self) -> None:
        """Wait until its main process has ended, for whatever reason."""
        while not self.has_ended:
            await asyncio.sleep(_POLL_INTERVAL_S)

    def require_running(self) -> None:
        """Raise ContainerEndedError if it has ended."""
        if self.has_ended:
            raise ContainerEndedError(f"the container {self._child.describe_exit()}; see its log")

    async def is_ready(self) -> bool:
        """Return whether /ping answers 200 in time."""
        ping = Request("GET", b"/ping", ((b"host", b"localhost"),), b"")
        try:
            head, _ = await asyncio.wait_for(fetch(self.socket, ping), _PING_TIMEOUT_S)
        except (ReplicaLostError, TimeoutError):
            return False
        return head.status == 200

    async def stop(self) -> None:
        """End it, by SIGTERM if that is enough, and delete its files."""
        self._child.terminate()
        deadline = time.monotonic() + _STOP_S
        while not self.has_ended and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_INTERVAL_S)
        self._child.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


def child_arguments(
    properties: Path, cpus: float, nodes: int, place: MeetingPoint | None
) -> tuple[str, ...]:
    """Return the arguments that both commands of `deploy.fleet.child` take, for this process's
    child."""
    address = "" if place is None else str(place)
    return (str(os.getpid()), str(properties), str(cpus), str(nodes), address)


def with_key(place: MeetingPoint | None) -> dict[str, str]:
    """Return this process's environment, with the key of the place where ranks meet."""
    key = {} if place is None else {KEY_VARIABLE: place.key.decode()}
    return {**os.environ, **key}
