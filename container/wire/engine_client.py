"""A worker's access to the engine that serves the model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from container.wire.channel import Clock
from container.wire.engine_connection import EngineConnection
from container.wire.engine_state import Health
from container.wire.token_stream import TokenStream
from core.protocol.facts import Facts
from core.protocol.messages import Submit, Variant


class EngineClient:
    """Sends requests to the engine. `CopiesClient` does if there are several, and chooses one."""

    def __init__(
        self, endpoint: str, *, heartbeat_timeout_s: float, clock: Clock = time.monotonic
    ) -> None:
        self.copies: Sequence[EngineConnection] = (
            EngineConnection(endpoint, heartbeat_timeout_s, clock),
        )
        """The connections to all engines."""

    @property
    def facts(self) -> Facts:
        """The settings the engine resolved. Raises EngineUnavailableError while it is not ready."""
        return self.copies[0].state.facts

    @property
    def variants(self) -> Sequence[Variant]:
        """The model's variants that an engine has loaded; empty while no engine is ready."""
        return self.copies[0].state.variants

    def digest(self, variant: str) -> str:
        """Return the engine's digest, and that of a variant. Raises as `facts` does."""
        digest = self.facts.digest
        if not variant:
            return digest
        return ".".join([digest, *(v.digest for v in self.variants if v.name == variant)])

    def health(self) -> Health:
        """Check that the engine is ready, sends heartbeats and completes steps."""
        return self.copies[0].health()

    def wait_until_ready(self, within_s: float) -> None:
        """Wait until an engine is ready, but no longer than `within_s` seconds."""
        self.copies[0].ready.wait(within_s)

    def delay_streams(self, seconds: float) -> None:
        """Let tokens wait for so long, so that streams get several at once."""
        for copy in self.copies:
            copy.stream_delay_s = seconds

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
        return self.copies[0]

    def submit(self, request: Submit, session: str | None) -> TokenStream:
        """Start a generation on the engine that `choose` chooses, as `EngineConnection` does."""
        return self.copies[0].submit(request)

    def by_variant(self, name: str) -> tuple[list[EngineConnection], list[EngineConnection]]:
        """Return the ready engines that have a variant, and those that lack it.

        If no engine is ready, returns the first, whose methods raise EngineUnavailableError.
        """
        return divided(name, self._ready())

    def count_refusal(self, reason: str) -> None:
        """Count a refused HTTP request.

        The counts are sent to a ready engine when its next heartbeat arrives.
        """
        self._ready()[0].refusals.add(reason)

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

    def _ready(self) -> Sequence[EngineConnection]:
        """Return the engines that are ready. If none is, return the first, whose methods raise."""
        return self.copies


def divided(
    name: str, copies: Sequence[EngineConnection]
) -> tuple[list[EngineConnection], list[EngineConnection]]:
    """Return the engines that have a variant, and those that lack it."""
    having = [copy for copy in copies if any(name == v.name for v in copy.state.variants)]
    return having, [copy for copy in copies if copy not in having]
