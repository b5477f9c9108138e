"""What every task that is not text generation does alike: hand a request on, and wait."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from flask import request

from container.disconnect import disconnect_check
from container.host import Host
from container.patience import Patience
from core.messages import Performed


class TaskHost(Host):
    """A host that has its engine perform a task."""

    def perform(self, body: bytes) -> Performed:
        """The engine's answer, of one part. Raises what `parts` raises."""
        (answer,) = self.parts(body, {})
        return answer

    def parts(self, body: bytes, headers: Mapping[str, str]) -> Generator[Performed]:
        """The parts of the engine's answer as they come, up to the one that is last.

        Raises RequestError, OverloadedError, GenerationError, EngineUnavailableError or
        ClientGoneError. However it ends, also by being closed, the engine has then forgotten the
        request.
        """
        patience = Patience(disconnect_check(request.environ), self.options.predict_timeout)
        reply = self.client.perform(body, headers)
        try:
            while True:
                part = patience.wait(reply.get)
                yield part
                if part.is_last:
                    return
        finally:
            reply.abort()
