"""What every task that is not text generation does alike: hand a request on, and wait."""

from __future__ import annotations

from collections.abc import Mapping

from container.host import Host
from core.messages import Performed


class TaskHost(Host):
    """A host that has its engine perform a task."""

    def perform(self, body: bytes, headers: Mapping[str, str] | None = None) -> Performed:
        """The engine's answer.

        Raises RequestError, OverloadedError, GenerationError, EngineUnavailableError or
        ClientGoneError; the engine has forgotten the request then.
        """
        return self.wait_for(self.client.perform(body, headers or {}))
