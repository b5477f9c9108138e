"""A replica: Ray's actor that owns a container, and passes requests on to it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from ray import serve
from ray.util import get_current_placement_group

from deploy.fleet.container_process import ContainerEndedError, ContainerProcess
from deploy.fleet.exchange import exchange, fetch
from deploy.fleet.http_message import Head, HttpRequest
from deploy.fleet.rank_host import OtherNodes, RanksEndedError

logger = logging.getLogger(__name__)
_POLL_INTERVAL_S = 0.05


class Replica:
    """Lives as long as its container. Serve sends it requests once the constructor has returned."""

    async def __init__(self, properties: str, cpus: float) -> None:
        """Start the container of a properties file on some cores; wait until its /ping is 200.

        In a placement group, also start the ranks in the group's other bundles, each of which has
        `cpus` cores.

        Raises ContainerEndedError or RanksEndedError if it cannot start; Serve then tries again a
        few times.
        """
        self._name = serve.get_replica_context().replica_id.unique_id
        self._num_exchanges = 0
        self._watch: asyncio.Task[None] | None = None
        group = get_current_placement_group()
        self._others = None if group is None else OtherNodes(group, properties, cpus)
        nodes, address = (
            (1, "") if self._others is None else (self._others.num_nodes, self._others.rank_address)
        )
        self._container = ContainerProcess(Path(properties), cpus, nodes, address)
        self._end = asyncio.ensure_future(self._wait_for_the_end())
        ready = asyncio.ensure_future(self._container.wait_until_ready())
        try:
            await asyncio.wait((ready, self._end), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                self._end.result()
            ready.result()
        except BaseException:
            ready.cancel()
            await self._stop()
            raise
        self._watch = asyncio.create_task(self._end_with_container())

    async def exchange(self, request: HttpRequest) -> AsyncGenerator[Head | bytes]:
        """Send a request to the container, as `deploy.fleet.exchange.exchange` does."""
        self._num_exchanges += 1
        try:
            async for part in exchange(self._container.socket, request):
                yield part
        finally:
            self._num_exchanges -= 1

    async def fetch(self, request: HttpRequest, timeout_s: float) -> tuple[str, Head, bytes]:
        """Send a request to the container; return this replica's name and the response.

        Raises TimeoutError.
        """
        answer = await asyncio.wait_for(fetch(self._container.socket, request), timeout_s)
        return (self._name, *answer)

    async def check_health(self) -> None:
        """Raise ContainerEndedError if the container has ended, RuntimeError if it is not ready."""
        if not await self._container.is_ready():
            self._container.require_running()
            raise RuntimeError("the container's /ping does not return 200")

    async def record_routing_stats(self) -> dict[str, bool]:
        """Tell the routers whether requests may be sent here."""
        return {"ready": await self._container.is_ready()}

    async def __del__(self) -> None:
        """End the container. Serve calls this when no requests are left, or during `__init__`."""
        if self._watch is not None:
            self._watch.cancel()
        await self._stop()

    async def _stop(self) -> None:
        self._end.cancel()
        if self._others is not None:
            self._others.stop()
        await self._container.stop()

    async def _wait_for_the_end(self) -> None:
        """Wait for the end of any process. Raises ContainerEndedError or RanksEndedError then."""
        waits = [self._container.wait_until_ended()]
        if self._others is not None:
            waits.append(self._others.wait_until_ended())
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._container.require_running()
            tasks[-1].result()
        finally:
            for task in tasks:
                task.cancel()

    async def _end_with_container(self) -> None:
        """End this process soon after the container or other ranks, so that Serve replaces it.

        The routers then drop this replica at the next request, without waiting for a health check.
        """
        try:
            await self._end
        except (ContainerEndedError, RanksEndedError) as error:
            logger.error("event=replica_ended replica=%s reason=%r", self._name, str(error))
        while self._num_exchanges:  # their last bytes are still on the way
            await asyncio.sleep(_POLL_INTERVAL_S)
        await self._stop()
        os._exit(1)
