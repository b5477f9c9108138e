"""Requests whose grammar is compiled beside the step loop, so that no stream waits for it."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

from core.messages import Perform, Submit
from engine.sampling.grammars import Grammars
from engine.serve.connection import Compiled, Inbound


class Compiling:
    """Holds them meanwhile. Each comes back through the inbox, as Compiled."""

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
        """Whether a client's request of that id is here."""
        return key in self._held

    def take(self, client: bytes, message: Submit | Perform, arrival: float) -> bool:
        """Takes a request whose grammar is not known yet; of others it says False.

        Raises RequestError where it can have no grammar.
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
        """Lets go of a request; False if it was not here, such as one that was aborted."""
        was_held = (client, id) in self._held
        self._held.discard((client, id))
        return was_held

    def forget(self, client: bytes) -> None:
        """Lets go of all that a client has sent."""
        self._held = {key for key in self._held if key[0] != client}
