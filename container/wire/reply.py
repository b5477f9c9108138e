"""The engine's reply to a request that generates no tokens."""

from __future__ import annotations

from collections.abc import Callable

import gevent.queue

from container.wire.token_stream import failure_of
from core.protocol.messages import AbortReason, Failed, Performed


class Reply:
    """A queue of the reply's parts, which the request handler reads."""

    awaits_receipt = False

    def __init__(self, id: str, on_abort: Callable[[str, None, AbortReason], None]) -> None:
        self.id = id
        self.has_ended = False
        """Whether the last part, or a failure, has arrived."""
        self._on_abort = on_abort
        self._arrived: gevent.queue.SimpleQueue[Performed | Failed] = gevent.queue.SimpleQueue()

    def get(self, timeout_s: float) -> Performed | None:
        """Return the next part, or None if none arrived within `timeout_s`.

        Raises the error that `failure_of` returns when the engine reports a failure.
        """
        try:
            message = self._arrived.get(timeout=timeout_s)
        except gevent.queue.Empty:
            return None
        if isinstance(message, Failed):
            raise failure_of(message)
        return message

    def push(self, message: Performed | Failed) -> None:
        """Add a part that the engine sent. Only EngineConnection calls this."""
        self.has_ended = isinstance(message, Failed) or message.is_last
        self._arrived.put(message)

    def deliver(self) -> None:
        """Do nothing: `push` has woken the greenlet that waits in `get`."""

    def abort(self, reason: AbortReason = "disconnect") -> None:
        """Abort the request in the engine, unless it has ended. May be called at any time."""
        self._on_abort(self.id, None, reason)
