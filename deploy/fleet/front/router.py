"""Serve's router of requests to replicas, which asks `core.routing` for the choice."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from collections import Counter

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from core.routing import ROUTERS
from deploy.fleet.front.prompt import routed_request

ANSWER_TIMEOUT_S = 0.5
ASK_AGAIN_S = 1.0


class ReplicaRouter(RequestRouter):
    """Chooses replicas with a router of core.routing. Each front has a router with its own memory.

    The loads come from Serve: replicas report their unfinished requests, including requests from
    other fronts, and a request that this front sends counts at once.
    """

    def initialize_state(self, router: str) -> None:
        """Start with a new router. Called by Serve. router: a name in ROUTERS."""
        self._router = ROUTERS[router]()
        self._chosen = Counter[str]()
        """Requests that were routed, but are not yet sent: Serve does not count them yet."""
        self._silent = dict[str, asyncio.Task[None]]()
        """Replicas that did not answer, with the tasks that ask them again."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then the others in case it is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # Serve pauses between two attempts
        loads = await self._loads(candidate_replicas)
        replicas = {_name(replica): replica for replica in candidate_replicas}
        chosen = self._router.choose(routed_request(pending_request.args[0]), loads)
        self._count(chosen, pending_request.future)
        others = [replicas[name] for name in loads if name != chosen]
        return [[replicas[chosen]], others]

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Send nothing to a replica that cannot be reached. Called by Serve.

        Ray itself declares a node dead only after several missed heartbeats.
        """
        super().on_replica_actor_unavailable(replica_id)
        self._avoid(replica_id)

    async def _loads(self, replicas: list[RunningReplica]) -> dict[str, int]:
        """Return the loads of the replicas that may get a request. There is always one."""
        cache = self.replica_queue_len_cache
        # The report of an idle replica expires, so the replica is asked again.
        unknown = [
            replica
            for replica in replicas
            if _name(replica) not in self._silent and cache.get(replica.replica_id) is None
        ]
        if unknown:
            await asyncio.gather(*(self._ask(replica) for replica in unknown))
        reachable = [
            replica for replica in replicas if _name(replica) not in self._silent
        ] or replicas
        ready = [
            replica for replica in reachable if replica.routing_stats.get("ready", True)
        ] or reachable
        return {
            _name(replica): (cache.get(replica.replica_id) or 0) + self._chosen[_name(replica)]
            for replica in ready
        }

    async def _ask(self, replica: RunningReplica) -> bool:
        """Ask a replica for its load; return whether it has answered in time."""
        question = replica.get_queue_len(deadline_s=ANSWER_TIMEOUT_S)
        try:
            load = await asyncio.wait_for(question, ANSWER_TIMEOUT_S)
        except Exception:  # Ray has many errors for a replica that does not answer
            self._avoid(replica.replica_id)
            return False
        self.on_new_queue_len_info(replica.replica_id, load)
        return True

    def _avoid(self, replica_id: ReplicaID) -> None:
        """Choose other replicas until this one answers again."""
        name = replica_id.unique_id
        if name not in self._silent:
            self._silent[name] = asyncio.ensure_future(self._ask_again(replica_id))

    async def _ask_again(self, replica_id: ReplicaID) -> None:
        while replica_id in self.curr_replicas:
            await asyncio.sleep(ASK_AGAIN_S)
            replica = self.curr_replicas.get(replica_id)
            if replica is not None and await self._ask(replica):
                break
        del self._silent[replica_id.unique_id]

    def _count(self, name: str, routed: asyncio.Future[RunningReplica]) -> None:
        self._chosen[name] += 1

        def uncount(future: asyncio.Future[RunningReplica]) -> None:
            self._chosen[name] -= 1
            if not self._chosen[name]:
                del self._chosen[name]

        routed.add_done_callback(uncount)


def _name(replica: RunningReplica) -> str:
    return replica.replica_id.unique_id
