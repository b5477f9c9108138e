"""What every task that is not text generation does alike: hand a request on, and wait."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from container.http.host import Host
from core.messages import Performed


class TaskHost(Host):
    """A host that has its engine perform a task."""

    def perform(self, body: bytes) -> Performed:
        """The engine's answer, of one part. Raises what `parts` raises."""
        return self.wait_for(self.client.perform(body, {}))

    def parts(self, body: bytes, headers: Mapping[str, str]) -> Generator[Performed]:
        """The parts of the engine's answer as they come, up to the one that is last.

        Raises RequestError, OverloadedError, GenerationError, EngineUnavailableError or
        ClientGoneError. However it ends, also by being closed, the engine has then forgotten the
        request.
        """
        yield from self.parts_of(self.client.perform(body, headers))
