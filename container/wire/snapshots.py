"""The engine's snapshots, for the live pages that are open on this worker."""

from __future__ import annotations

from collections.abc import Callable

import gevent.event

from core.protocol.snapshot import Snapshot

WATCH_S = 5.0
"""How long the engine sends snapshots after the last request for them."""
RENEWAL_S = 2.0


class SnapshotFeed:
    """Passes each snapshot to all callers that wait for one, and keeps none.

    While callers wait, it renews its request for snapshots, even to a restarted engine. When the
    last page is closed, it stops asking, and the engine stops sending snapshots.
    """

    def __init__(self, ask: Callable[[float], None], clock: Callable[[], float]) -> None:
        """ask: asks the engine, if it is ready, for snapshots for a number of seconds."""
        self.is_closed = False
        self._ask = ask
        self._clock = clock
        self._ask_due = 0.0
        self._next: gevent.event.AsyncResult[Snapshot | None] = gevent.event.AsyncResult()

    def wait(self, timeout_s: float) -> Snapshot | None:
        """Return the next snapshot, or None if none arrives within `timeout_s`.

        None is also returned when this feed is closed.
        """
        if self.is_closed:
            return None
        if self._clock() >= self._ask_due:
            self._ask_due = self._clock() + RENEWAL_S
            self._ask(WATCH_S)
        return self._next.wait(timeout_s)

    def push(self, snapshot: Snapshot | None) -> None:
        """Hand out a snapshot that the engine sent. Only EngineConnection calls this."""
        arrived, self._next = self._next, gevent.event.AsyncResult()
        arrived.set(snapshot)

    def close(self) -> None:
        """End all waits. Later waits end at once."""
        self.is_closed = True
        self.push(None)
