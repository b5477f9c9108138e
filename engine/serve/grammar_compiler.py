"""Compiles the grammars of requests in a thread, so that no stream waits for one."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

from core.messages import Perform, Submit
from engine.sampling.grammars import Grammars
from engine.serve.connection import Compiled, Inbound


class GrammarCompiler:
    """Holds requests while their grammars are compiled.

    Each comes back through the inbox, as a Compiled message. Called by the server's loop only.
    """

    def __init__(
        self, grammars: Grammars | None, inbox: queue.SimpleQueue[tuple[bytes, Inbound]]
    ) -> None:
        self._grammars = grammars
        self._inbox = inbox
        self._held: set[tuple[bytes, str]] = set()
        self._thread = ThreadPoolExecutor(1, "grammars")

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: tuple[bytes, str]) -> bool:
        """Whether a client's request with that id is held."""
        return key in self._held

    def take(self, client: bytes, message: Submit | Perform, arrival: float) -> bool:
        """Hold a request whose grammar must be compiled first. Return False for any other.

        Raises RequestError if its `structured_outputs` has no grammar.
        """
        if not isinstance(message, Submit) or self._grammars is None:
            return False
        form = message.params.structured_outputs
        if form is None or self._grammars.knows(form):
            return False
        self._held.add((client, message.id))
        done = self._thread.submit(self._grammars.matcher, form)
        done.add_done_callback(
            lambda done: self._inbox.put((client, Compiled(message, arrival, done.exception())))
        )
        return True

    def release(self, client: bytes, id: str) -> bool:
        """Stop holding a request. Return False if it was not held, for example after an abort."""
        was_held = (client, id) in self._held
        self._held.discard((client, id))
        return was_held

    def forget(self, client: bytes) -> None:
        """Stop holding the requests of a client."""
        self._held = {key for key in self._held if key[0] != client}
