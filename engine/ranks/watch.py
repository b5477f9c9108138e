"""Notices within a few seconds that another rank has died, stopped, or failed.

Without this, the other ranks would wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait

TICK_S = 0.5
MAX_SILENT_TICKS = 7
"""How long a rank may be silent. Counted in ticks of this process, so that the time in which the
whole machine is suspended does not count."""
CULPRIT_S = 0.5
"""How long to wait, if all lost ranks have sent a failure report, for a rank that ends without a
report. That rank is then the one at fault."""
BEAT = b"."

OnLost = Callable[[int, bytes], None]
"""Called once, in the watch's thread, with the lost rank and its encoded FailureReport, if any."""


class Watch:
    """Exchanges beats with other ranks, in a thread of its own."""

    def __init__(self, peers: Mapping[int, Connection], on_lost: OnLost) -> None:
        """peers: connections to the watches of the other ranks, by rank."""
        self._peers = peers
        self._on_lost = on_lost
        self._stopped, self._stop = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. May be called again, but not by `on_lost`."""
        with contextlib.suppress(OSError):
            self._stop.send_bytes(BEAT)
        self._thread.join()
        self._stop.close()

    def _run(self) -> None:
        silent_ticks = dict.fromkeys(self._peers, 0)
        by_connection = {connection: rank for rank, connection in self._peers.items()}
        next_tick = time.monotonic()
        while True:
            timeout = max(0.0, next_tick - time.monotonic())
            lost: dict[int, bytes] = {}
            for connection in wait([*by_connection, self._stopped], timeout):
                if connection is self._stopped:
                    return None
                assert isinstance(connection, Connection)
                rank = by_connection[connection]
                message = _received(connection)
                if message != BEAT:
                    lost[rank] = message
                silent_ticks[rank] = 0
            if lost:
                rank = self._culprit(lost)
                return self._on_lost(rank, lost[rank])
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                for rank, connection in self._peers.items():
                    silent_ticks[rank] += 1
                    if silent_ticks[rank] > MAX_SILENT_TICKS:
                        return self._on_lost(rank, b"")
                    with contextlib.suppress(OSError):  # the next wait notices that it is closed
                        connection.send_bytes(BEAT)

    def _culprit(self, lost: dict[int, bytes]) -> int:
        """Return which of the ranks in `lost` is at fault. Adds those that are lost meanwhile.

        A rank that ends without a report makes the others' collectives fail, and their failure
        reports may arrive before its end is noticed.
        """
        deadline = time.monotonic() + CULPRIT_S
        while all(lost.values()) and time.monotonic() < deadline:
            others = {peer: rank for rank, peer in self._peers.items() if rank not in lost}
            if not others:
                break
            for connection in wait([*others], deadline - time.monotonic()):
                assert isinstance(connection, Connection)
                message = _received(connection)
                if message != BEAT:
                    lost[others[connection]] = message
        return next((rank for rank, message in lost.items() if not message), next(iter(lost)))


def _received(connection: Connection) -> bytes:
    """Return a message; empty if the other end is closed."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return b""
