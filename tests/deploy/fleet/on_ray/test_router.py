"""The router's choices, without a cluster: replicas are stand-ins that answer or do not."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.fleet.http_message import Request

pytest.importorskip("ray.serve", reason="Ray is not installed; make fleet-test installs it")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from deploy.fleet.front import router as router_module
from deploy.fleet.front.router import ReplicaRouter

DEPLOYMENT = DeploymentID(name="Replica", app_name="longshore")


class StandIn:
    """A replica, as far as the router knows it."""

    def __init__(self, name: str, load: int = 0, *, ready: bool = True, answers: bool = True):
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.routing_stats = {"ready": ready}
        self.load = load
        self.answers = answers

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if not self.answers:
            await asyncio.sleep(60)
        return self.load


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "ANSWER_TIMEOUT_S", 0.01)
    monkeypatch.setattr(router_module, "ASK_AGAIN_S", 0.01)


def make_router(*replicas: StandIn, name: str = "prefix-aware") -> ReplicaRouter:
    router = ReplicaRouter(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    router.initialize_state(name)
    router.update_replicas(list(replicas))
    return router


def pending(session: str = "", text: str = "a") -> PendingRequest:
    headers = ((b"x-amzn-sagemaker-session-id", session.encode()),) if session else ()
    body = json.dumps({"inputs": text}).encode()
    metadata: Any = SimpleNamespace()
    return PendingRequest([Request("POST", b"/invocations", headers, body)], {}, metadata)


async def choose(router: ReplicaRouter, request: PendingRequest | None = None) -> str:
    replicas = list(router.curr_replicas.values())
    [[chosen], _] = await router.choose_replicas(replicas, request or pending())
    return chosen.replica_id.unique_id


def test_the_least_loaded_replica_is_chosen():
    async def run() -> str:
        return await choose(make_router(StandIn("a", 2), StandIn("b", 1), StandIn("c", 3)))

    assert asyncio.run(run()) == "b"


def test_round_robin_regards_neither_prompt_nor_load():
    async def run() -> list[str]:
        router = make_router(StandIn("a"), StandIn("b", 9), name="round-robin")
        return [await choose(router, pending(text="a" * 999)) for _ in range(4)]

    assert asyncio.run(run()) == ["a", "b", "a", "b"]


def test_requests_that_are_not_yet_sent_count():
    async def run() -> set[str]:
        router = make_router(StandIn("a"), StandIn("b"))
        return {await choose(router), await choose(router)}

    assert asyncio.run(run()) == {"a", "b"}


def test_a_request_counts_no_longer_once_serve_counts_it():
    async def run() -> list[str]:
        router, first = make_router(StandIn("a"), StandIn("b", 1)), pending()
        chosen = [await choose(router, first)]
        first.future.set_result(None)
        await asyncio.sleep(0)
        return [*chosen, await choose(router)]

    assert asyncio.run(run()) == ["a", "a"]


def test_a_session_stays_at_its_replica():
    async def run() -> list[str]:
        router = make_router(StandIn("a"), StandIn("b"))
        return [await choose(router, pending("s")) for _ in range(3)]

    assert asyncio.run(run()) == ["a"] * 3


@pytest.mark.parametrize("broken", [{"ready": False}, {"answers": False}])
def test_a_replica_that_is_not_ready_or_does_not_answer_gets_nothing(broken: dict[str, bool]):
    async def run() -> list[str]:
        router = make_router(StandIn("a", **broken), StandIn("b", 5))
        return [await choose(router) for _ in range(3)]

    assert asyncio.run(run()) == ["b"] * 3


def test_a_replica_that_answers_again_is_chosen_again():
    async def run() -> list[str]:
        lost, other = StandIn("a"), StandIn("b", 5)
        router = make_router(lost, other)
        await choose(router)
        lost.answers = False
        router.on_replica_actor_unavailable(lost.replica_id)
        chosen = [await choose(router)]
        lost.answers = True
        await asyncio.sleep(0.2)
        return [*chosen, await choose(router)]

    assert asyncio.run(run()) == ["b", "a"]


def test_if_none_is_ready_one_is_chosen_all_the_same():
    async def run() -> str:
        return await choose(make_router(StandIn("a", ready=False), StandIn("b", 1, ready=False)))

    assert asyncio.run(run()) == "a"
