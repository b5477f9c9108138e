"""A worker's access to several engines, each with a copy of the model (option.copies)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import gevent

from container.wire.channel import Clock
from container.wire.engine_client import EngineClient, divided
from container.wire.engine_connection import EngineConnection
from container.wire.engine_state import Health
from container.wire.token_stream import TokenStream
from core.protocol.facts import Facts
from core.protocol.messages import Submit, Variant
from core.routing import PrefixAware, RoutedRequest, Router, prefix_keys


class CopiesClient(EngineClient):
    """Chooses the engine for each request.

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
        # Not the base class's, which connects to one engine.
        self.copies = tuple(
            EngineConnection(endpoint, heartbeat_timeout_s, clock, label=f"copy={number}")
            for number, endpoint in enumerate(endpoints)
        )
        self._router = router or PrefixAware()

    @property
    def facts(self) -> Facts:
        """The settings of the ready engine that has the lowest `max_model_len`.

        Raises EngineUnavailableError while no engine is ready.
        """
        return min((c.state.facts for c in self._ready()), key=lambda facts: facts.max_model_len)

    @property
    def variants(self) -> Sequence[Variant]:
        by_name: dict[str, Variant] = {}
        for copy in self.copies:
            for variant in copy.state.variants:
                by_name.setdefault(variant.name, variant)
        return tuple(by_name.values())

    def health(self) -> Health:
        """Return the health of the first engine that is healthy, or else of the first engine."""
        found = [copy.health() for copy in self.copies]
        return next((health for health in found if health.healthy), found[0])

    def wait_until_ready(self, within_s: float) -> None:
        gevent.wait([copy.ready for copy in self.copies], within_s, count=1)

    def choose(
        self,
        session: str | None = None,
        prompt_token_ids: Sequence[int] = (),
        variant: str = "",
    ) -> EngineConnection:
        candidates = self._candidates(variant)
        if session is not None:
            candidates = [max(candidates, key=lambda copy: _weight(session, copy.endpoint))]
        by_name = {copy.endpoint: copy for copy in candidates}
        request = RoutedRequest(session, prefix_keys(prompt_token_ids, variant))
        loads = {name: copy.load for name, copy in by_name.items()}
        return by_name[self._router.choose(request, loads)]

    def submit(self, request: Submit, session: str | None) -> TokenStream:
        return self.choose(session, request.prompt_token_ids, request.variant).submit(request)

    def _candidates(self, variant: str) -> Sequence[EngineConnection]:
        """Return the engines that suit a request best: healthy, with its variant if possible.

        A restarted engine lacks the variants that were loaded over HTTP.
        """
        ready = self._ready()
        healthy = [copy for copy in ready if copy.health().healthy] or ready
        return (variant and divided(variant, healthy)[0]) or healthy

    def _ready(self) -> Sequence[EngineConnection]:
        return [copy for copy in self.copies if copy.state.is_ready] or self.copies[:1]


def _weight(session: str, endpoint: str) -> bytes:
    """Return an engine's weight for a session. The engine with the highest one serves the session.

    All workers compute the same weights. When an engine is lost, only its sessions move (rendezvous
    hashing, Thaler and Ravishankar, 1998).
    """
    return hashlib.blake2b(f"{session} {endpoint}".encode(errors="replace"), digest_size=8).digest()
