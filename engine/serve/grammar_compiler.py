"""Compiles the grammars of requests in a thread, so that no stream waits for a grammar."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

from core.protocol.messages import Submit
from engine.sampling.grammars import Grammars
from engine.serve.connection import Inbound, Prepared


class GrammarCompiler:
    """Compiles grammars that are not compiled yet. Only the loop calls this."""

    def __init__(
        self, grammars: Grammars | None, inbox: queue.SimpleQueue[tuple[bytes, Inbound]]
    ) -> None:
        self._grammars = grammars
        self._inbox = inbox
        self._thread = ThreadPoolExecutor(1, "grammars")

    def compiles(self, client: bytes, message: Submit, arrival: float) -> bool:
        """Begin to compile the grammar of a request, if there is one that is not compiled.

        The request then comes back through the inbox. Raises RequestError if its
        `structured_outputs` cannot be converted to a grammar.
        """
        form = message.params.structured_outputs
        if form is None or self._grammars is None or self._grammars.is_compiled(form):
            return False
        done = self._thread.submit(self._grammars.matcher, form)
        done.add_done_callback(
            lambda done: self._inbox.put((client, Prepared(message, arrival, done.exception())))
        )
        return True
