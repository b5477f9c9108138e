"""Compiles the grammars of requests in a thread, so that no stream waits for a grammar."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from core.protocol.messages import Perform, Submit
from engine.sampling.grammars import Grammars
from engine.serve.connection import Compiled, Inbound


class GrammarCompiler:
    """Holds requests while their grammars are compiled.

    Each request comes back through the inbox, as a Compiled message. Only the loop calls this.
    """

    def __init__(
        self, grammars: Grammars | None, inbox: queue.SimpleQueue[tuple[bytes, Inbound]]
    ) -> None:
        self._grammars = grammars
        self._inbox = inbox
        self._held: dict[tuple[bytes, str], Submit] = {}
        self._thread = ThreadPoolExecutor(1, "grammars")

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[tuple[bytes, str]]:
        """Yield the client and the id of each held request."""
        return iter(self._held)

    def __contains__(self, key: tuple[bytes, str]) -> bool:
        """Whether a client's request with that id is held."""
        return key in self._held

    def take(self, client: bytes, message: Submit | Perform, arrival: float) -> bool:
        """Hold a request whose grammar must be compiled first. Return False for any other.

        Raises RequestError if its `structured_outputs` cannot be converted to a grammar.
        """
        if not isinstance(message, Submit) or self._grammars is None:
            return False
        form = message.params.structured_outputs
        if form is None or self._grammars.is_compiled(form):
            return False
        done = self._thread.submit(self._grammars.matcher, form)
        self._held[client, message.id] = message
        done.add_done_callback(
            lambda done: self._inbox.put((client, Compiled(message, arrival, done.exception())))
        )
        return True

    def release(self, client: bytes, id: str) -> Submit | None:
        """Stop holding a request. Return None if it was not held, for example after an abort."""
        return self._held.pop((client, id), None)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the held requests, counted once per answer."""
        return sum(map(num_prompt_tokens, self._held.values()))


def num_prompt_tokens(message: Submit) -> int:
    """Return the prompt tokens of a request, counted once per answer."""
    return len(message.prompt_token_ids) * message.params.num_samples
