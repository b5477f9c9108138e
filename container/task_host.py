"""What every task that is not text generation does alike: hand a request on, and wait."""

from __future__ import annotations

from collections.abc import Mapping

from flask import request

from container.disconnect import disconnect_check
from container.host import Host
from container.patience import Patience
from core.messages import Performed


class TaskHost(Host):
    """A host that has its engine perform a task."""

    def perform(self, body: bytes, headers: Mapping[str, str] | None = None) -> Performed:
        """The engine's answer.

        Raises RequestError, OverloadedError, GenerationError, EngineUnavailableError or
        ClientGoneError; the engine has forgotten the request then.
        """
        patience = Patience(disconnect_check(request.environ), self.options.predict_timeout)
        reply = self.client.perform(body, headers or {})
        try:
            return patience.wait(reply.get)
        finally:
            reply.abort()
