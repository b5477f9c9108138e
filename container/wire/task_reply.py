"""What the engine says of a performed task, whole or in parts, or of a change of adapters."""

from __future__ import annotations

from collections.abc import Callable

import gevent.queue

from container.wire.token_stream import failure_of
from core.messages import Failed, Performed


class TaskReply:
    """Waits for whoever serves the request."""

    def __init__(self, id: str, on_abort: Callable[[str], None]) -> None:
        self.id = id
        self._on_abort = on_abort
        self._arrived: gevent.queue.SimpleQueue[Performed | Failed] = gevent.queue.SimpleQueue()

    def get(self, timeout_s: float) -> Performed | None:
        """The next part; None where it did not come in time.

        Raises what `failure_of` makes of the engine's refusal.
        """
        try:
            message = self._arrived.get(timeout=timeout_s)
        except gevent.queue.Empty:
            return None
        if isinstance(message, Failed):
            raise failure_of(message)
        return message

    def push(self, message: Performed | Failed) -> None:
        """Takes in the message of the engine; for the client alone."""
        self._arrived.put(message)

    def abort(self) -> None:
        """Has the engine forget it, unless it ended by itself; may be called at any time."""
        self._on_abort(self.id)
