"""A worker's access to the engines that serve the model, each with a copy of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import gevent

from container.wire.channel import Clock
from container.wire.engine_connection import EngineConnection
from container.wire.engine_state import Health
from container.wire.token_stream import TokenStream
from core.protocol.facts import Facts
from core.protocol.messages import Submit, Variant
from core.routing import PrefixAware, RoutedRequest, Router, prefix_keys


class EngineClient:
    """Chooses the engine for each request. There is one engine for each copy of the model.

    An engine that is not ready or hangs gets requests only if no other engine serves. A session's
    requests go to the same copy while that copy serves and has the request's variant, whichever
    worker gets them.
    """

    def __init__(
        self,
        *endpoints: str,
        heartbeat_timeout_s: float,
        router: Router | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """endpoints: the engines' addresses. router: default PrefixAware."""
        labels = [f"copy={number}" for number in range(len(endpoints))]
        self.copies = tuple(
            EngineConnection(endpoint, heartbeat_timeout_s, clock, label=label)
            for endpoint, label in zip(endpoints, labels if len(labels) > 1 else [""], strict=True)
        )
        self._router = router or PrefixAware()

    @property
    def facts(self) -> Facts:
        """The settings of the ready engine that has the lowest `max_model_len`.

        Raises EngineUnavailableError while no engine is ready.
        """
        ready = [copy.state.facts for copy in self.copies if copy.state.is_ready]
        return min(ready or [self.copies[0].state.facts], key=lambda facts: facts.max_model_len)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The model's variants that an engine has loaded; empty while no engine is ready."""
        by_name: dict[str, Variant] = {}
        for copy in self.copies:
            for variant in copy.state.variants:
                by_name.setdefault(variant.name, variant)
        return tuple(by_name.values())

    def digest(self, variant: str) -> str:
        """Return the engines' digest, and that of a variant. Raises as `facts` does."""
        digest = self.facts.digest
        if not variant:
            return digest
        return ".".join([digest, *(v.digest for v in self.variants if v.name == variant)])

    def health(self) -> Health:
        """Return the health of the first engine that is healthy, or else of the first engine."""
        found = [copy.health() for copy in self.copies]
        return next((health for health in found if health.healthy), found[0])

    def wait_until_ready(self, within_s: float) -> None:
        """Wait until an engine is ready, but no longer than `within_s` seconds."""
        gevent.wait([copy.ready for copy in self.copies], within_s, count=1)

    def num_unfinished(self) -> int:
        """Return how many sequences run or wait, as of the engines' last heartbeats."""
        counts = [copy.state.stats for copy in self.copies]
        return sum(stats.num_running + stats.num_waiting for stats in counts)

    def num_serving(self) -> int:
        """Return how many engines are healthy."""
        return sum(copy.health().healthy for copy in self.copies)

    def choose(
        self,
        session: str | None = None,
        prompt_token_ids: Sequence[int] = (),
        variant: str = "",
    ) -> EngineConnection:
        """Return the connection to the engine that a request should be sent to.

        While no engine is ready, the methods of this connection raise EngineUnavailableError.
        """
        first, *others = self.copies
        return self._choose(session, prompt_token_ids, variant) if others else first

    def _choose(
        self, session: str | None, prompt_token_ids: Sequence[int], variant: str
    ) -> EngineConnection:
        candidates = self._candidates(variant)
        if session is not None:
            candidates = [max(candidates, key=lambda copy: _weight(session, copy.endpoint))]
        by_name = {copy.endpoint: copy for copy in candidates}
        request = RoutedRequest(session, prefix_keys(prompt_token_ids, variant))
        loads = {name: copy.load for name, copy in by_name.items()}
        return by_name[self._router.choose(request, loads)]

    def submit(self, request: Submit, session: str | None) -> TokenStream:
        """Start a generation on the engine that `choose` chooses, as `EngineConnection` does."""
        if len(self.copies) == 1:
            return self.copies[0].submit(request)
        return self.choose(session, request.prompt_token_ids, request.variant).submit(request)

    def by_variant(self, name: str) -> tuple[list[EngineConnection], list[EngineConnection]]:
        """Return the ready engines that have a variant, and those that lack it.

        If no engine is ready, returns the first, whose methods raise EngineUnavailableError.
        """
        return _by_variant(name, self._ready())

    def count_refusal(self, reason: str) -> None:
        """Count a refused HTTP request.

        The counts are sent to a ready engine when its next heartbeat arrives.
        """
        self._ready()[0].count_refusal(reason)

    def end_watching(self) -> None:
        """End all waits for snapshots. Later waits end at once."""
        for copy in self.copies:
            copy.snapshots.close()

    def fail_all(self, reason: str) -> None:
        """Fail every running request with `reason`."""
        for copy in self.copies:
            copy.fail_all(reason)

    def close(self) -> None:
        """Fail the running requests and close the sockets."""
        for copy in self.copies:
            copy.close()

    def _candidates(self, variant: str) -> list[EngineConnection]:
        """Return the engines that suit a request best: healthy, with its variant if possible.

        A restarted engine lacks the variants that were loaded over HTTP.
        """
        ready = self._ready()
        healthy = [copy for copy in ready if copy.health().healthy] or ready
        return (variant and _by_variant(variant, healthy)[0]) or healthy

    def _ready(self) -> list[EngineConnection]:
        """Return the engines that are ready. If none is, return the first, whose methods raise."""
        return [copy for copy in self.copies if copy.state.is_ready] or [self.copies[0]]


def _by_variant(
    name: str, copies: Sequence[EngineConnection]
) -> tuple[list[EngineConnection], list[EngineConnection]]:
    having = [copy for copy in copies if any(name == v.name for v in copy.state.variants)]
    return having, [copy for copy in copies if copy not in having]


def _weight(session: str, endpoint: str) -> bytes:
    """Return an engine's weight for a session. The engine with the highest one serves the session.

    All workers compute the same weights. When an engine is lost, only its sessions move (rendezvous
    hashing, Thaler and Ravishankar, 1998).
    """
    return hashlib.blake2b(f"{session} {endpoint}".encode(errors="replace"), digest_size=8).digest()
