"""How rank 0 waits for the ranks of other machines."""

from __future__ import annotations

import logging
import socket
import time
from multiprocessing.connection import Connection, wait

from core.errors import ConfigurationError
from core.layout import counted
from core.ranks import KEY_VARIABLE, MeetingPoint
from engine.ranks.peers import JoinedRank
from engine.ranks.tcp import Hello, WrongKeyError, accept, listen

logger = logging.getLogger(__name__)

REMIND_S = 30.0


def wait_for_ranks(place: MeetingPoint, count: int, timeout_s: float) -> list[JoinedRank]:
    """Wait until this many ranks have joined; return them, those of one machine together.

    Further ones are refused, and try again.

    Raises ConfigurationError if this is no address of this machine, or too few join in time.
    """
    with listen(place) as listener:
        meeting = _Meeting(listener, place, count)
        try:
            meeting.run(timeout_s)
        except BaseException:
            for rank in meeting.ranks:
                rank.close()
            raise
        finally:
            meeting.close()
    return sorted(meeting.ranks, key=lambda rank: rank.host)


class _Meeting:
    def __init__(self, listener: socket.socket, place: MeetingPoint, count: int) -> None:
        self.ranks: list[JoinedRank] = []
        self._listener, self._place, self._count = listener, place, count
        self._halves = dict[bytes, tuple[Connection, Hello]]()
        """The connections of ranks of which only one has come, by the rank's number."""

    def run(self, timeout_s: float) -> None:
        began = time.monotonic()
        remind_at = began
        while len(self.ranks) < self._count:
            now = time.monotonic()
            if now >= began + timeout_s:
                raise ConfigurationError(self._missing(timeout_s))
            if now >= remind_at:
                logger.info("%d of %d ranks have joined at %s", *self._progress())
                remind_at = now + REMIND_S
            beats = [rank.beats for rank in self.ranks]
            timeout = min(began + timeout_s, remind_at) - now
            if self._listener in wait([self._listener, *beats], timeout):
                self._accept()
            self._drop_those_that_left()

    def close(self) -> None:
        """Close what has not become a rank."""
        for connection, _ in self._halves.values():
            connection.close()

    def _accept(self) -> None:
        try:
            connection, hello, host = accept(self._listener, self._place.key)
        except WrongKeyError as error:
            logger.warning("refused a rank: %s", error)
            return
        except (OSError, EOFError) as error:
            logger.warning("refused a connection that is no rank's: %s", error or "it was closed")
            return
        other, its_hello = self._halves.pop(hello.rank, (None, None))
        if other is None or its_hello == hello:
            self._halves[hello.rank] = connection, hello
            return
        orders, beats = (other, connection) if hello.is_beats else (connection, other)
        self.ranks.append(JoinedRank(orders, beats, host))
        logger.info("%d of %d ranks have joined at %s", *self._progress())

    def _drop_those_that_left(self) -> None:
        for rank in [rank for rank in self.ranks if rank.has_left]:
            logger.warning("a rank on %s has left before all have joined", rank.host)
            rank.close()
            self.ranks.remove(rank)

    def _progress(self) -> tuple[int, int, MeetingPoint]:
        return len(self.ranks), self._count, self._place

    def _missing(self, timeout_s: float) -> str:
        missing = counted(self._count - len(self.ranks), "rank")
        return (
            f"{missing} of other machines did not join at {self._place} within {timeout_s:g} s; "
            "run `longshore join` on each of them, with this model, the same properties and the "
            f"same {KEY_VARIABLE}, and let them reach this address"
        )
