"""A replica without a cluster: its container is a stand-in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make fleet-test installs it")

from deploy.fleet import replica as replica_module
from deploy.fleet.replica import Replica


class NeverReady:
    """A container that is loading when Serve stops the replica."""

    def __init__(self, *_: object) -> None:
        self.stopped = asyncio.Event()

    async def wait_until_ready(self) -> None:
        await asyncio.sleep(60)

    async def wait_until_ended(self) -> None:
        await self.stopped.wait()

    async def stop(self) -> None:
        self.stopped.set()


def test_a_replica_that_is_stopped_while_it_starts_stops_its_container(
    monkeypatch: pytest.MonkeyPatch,
):
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(replica_module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(replica_module, "get_current_placement_group", lambda: None)
    monkeypatch.setattr(replica_module, "ContainerProcess", NeverReady)

    async def run() -> None:
        replica = Replica.__new__(Replica)
        starting = asyncio.ensure_future(replica.__init__("serving.properties", 1.0))
        await asyncio.sleep(0.01)
        await replica.__del__()
        assert replica._container.stopped.is_set()
        await asyncio.wait([starting])
        assert starting.cancelled()
        monkeypatch.delattr(Replica, "__del__")  # the garbage collector would call it, too

    asyncio.run(run())
