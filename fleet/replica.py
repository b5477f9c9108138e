"""A replica: Ray's actor that owns a container, and passes requests on to it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from ray import serve

from fleet.container_process import ContainerProcess
from fleet.exchange import exchange, fetch
from fleet.http_message import Head, Request

logger = logging.getLogger(__name__)
_POLL_INTERVAL_S = 0.05


class Replica:
    """Lives as long as its container. Serve sends it requests once the constructor has returned."""

    async def __init__(self, properties: str, cpus: float) -> None:
        """Start the container of a properties file on some cores; wait until its /ping is 200.

        Raises ContainerEndedError if it cannot start; Serve then tries again a few times.
        """
        self._name = serve.get_replica_context().replica_id.unique_id
        self._num_exchanges = 0
        self._container = ContainerProcess(Path(properties), cpus)
        try:
            await self._container.wait_until_ready()
        except BaseException:
            await self._container.stop()
            raise
        self._watch = asyncio.create_task(self._end_with_container())

    async def exchange(self, request: Request) -> AsyncGenerator[Head | bytes]:
        """Send a request to the container, as `fleet.exchange.exchange` does."""
        self._num_exchanges += 1
        try:
            async for part in exchange(self._container.socket, request):
                yield part
        finally:
            self._num_exchanges -= 1

    async def fetch(self, request: Request, timeout_s: float) -> tuple[str, Head, bytes]:
        """Send a request to the container; return this replica's name and the response.

        Raises TimeoutError.
        """
        answer = await asyncio.wait_for(fetch(self._container.socket, request), timeout_s)
        return (self._name, *answer)

    async def check_health(self) -> None:
        """Raise ContainerEndedError if the container has ended, or is not ready."""
        if not await self._container.is_ready():
            self._container.require_running()
            raise RuntimeError("the container's /ping is not 200")

    async def record_routing_stats(self) -> dict[str, bool]:
        """Tell the routers whether requests may be sent here."""
        return {"ready": await self._container.is_ready()}

    async def __del__(self) -> None:
        """End the container. Serve calls this when all requests have ended."""
        self._watch.cancel()
        await self._container.stop()

    async def _end_with_container(self) -> None:
        """End this process soon after the container, so that Serve starts another replica.

        The routers then drop this one at the next request, without waiting for a health check.
        """
        await self._container.wait_until_ended()
        while self._num_exchanges:  # their last bytes are still on the way
            await asyncio.sleep(_POLL_INTERVAL_S)
        logger.error("event=container_ended replica=%s", self._name)
        await self._container.stop()
        os._exit(1)
