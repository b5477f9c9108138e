"""How rank 0 waits for the ranks of other machines."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from multiprocessing.connection import Connection, wait

from core.configuration.layout import quantity
from core.configuration.meeting_point import KEY_VARIABLE, MeetingPoint
from core.errors import ConfigurationError
from engine.ranks.peers import JoinedRank
from engine.ranks.tcp import Candidate, Channel, WrongKeyError, accept, listen

logger = logging.getLogger(__name__)

REMIND_S = 30.0
MAX_CANDIDATES = 256
"""Connections that may be in their handshake at a time."""


def wait_for_ranks(place: MeetingPoint, count: int, timeout_s: float) -> list[JoinedRank]:
    """Wait until this many ranks have joined. Return them, grouped by machine.

    Further ranks are refused; they try again by themselves.

    Raises ConfigurationError if `place` is not an address of this machine, or its port is not free,
    or too few ranks join in time.
    """
    try:
        listener = listen(place.host, place.port)
    except OSError as error:
        raise ConfigurationError(
            f"option.rank_address={place}: {error.strerror}; it must be an address of this "
            "machine, and a port that is free"
        ) from error
    with listener:
        address = listener.getsockname()[0]
        if address != place.host and ipaddress.ip_address(address).is_loopback:
            logger.warning(
                "%s is the address %s on this machine, which no other machine can reach",
                place.host,
                address,
            )
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
    """Does all handshakes at the same time, in one thread that none of them can block."""

    def __init__(self, listener: socket.socket, place: MeetingPoint, count: int) -> None:
        self.ranks: list[JoinedRank] = []
        self._listener, self._place, self._count = listener, place, count
        self._candidates = dict[socket.socket, Candidate]()
        self._halves = dict[bytes, Channel]()
        """By `Channel.rank`: the channel of each rank whose other channel has not arrived yet."""

    def run(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        remind_at = time.monotonic()
        while len(self.ranks) < self._count:
            now = time.monotonic()
            if now >= deadline:
                raise ConfigurationError(self._missing(timeout_s))
            if now >= remind_at:
                logger.info("%d of %d ranks have joined at %s", *self._progress())
                remind_at = now + REMIND_S
            self._wait(min(deadline, remind_at))

    def close(self) -> None:
        """Close the connections that do not belong to a joined rank."""
        for end in self._candidates:
            end.close()
        for channel in self._halves.values():
            channel.connection.close()

    def _wait(self, until: float) -> None:
        """Wait for events, but not past the time `until`, and handle those that have come."""
        until = min([until, *(candidate.deadline for candidate in self._candidates.values())])
        sources: list[Connection | socket.socket] = [rank.beats for rank in self.ranks]
        sources += self._candidates
        if len(self._candidates) < MAX_CANDIDATES:
            sources.append(self._listener)
        for ready in wait(sources, max(0.0, until - time.monotonic())):
            if ready is self._listener:
                self._accept()
            elif isinstance(ready, socket.socket) and len(self.ranks) < self._count:
                self._hear(self._candidates[ready])
        for candidate in list(self._candidates.values()):
            if time.monotonic() >= candidate.deadline:
                self._drop(candidate, "it did not prove in time that it knows the key")
        self._drop_those_that_left()

    def _accept(self) -> None:
        try:
            candidate = accept(self._listener)
        except OSError as error:
            logger.warning("could not accept a connection: %s", error)
        else:
            self._candidates[candidate.end] = candidate

    def _hear(self, candidate: Candidate) -> None:
        try:
            channel = candidate.read(self._place.key)
        except WrongKeyError as error:
            self._drop(candidate, str(error))
        except (OSError, EOFError) as error:
            self._drop(candidate, str(error) or type(error).__name__)
        else:
            if channel is not None:
                del self._candidates[candidate.end]
                self._add(channel, candidate.host)

    def _drop(self, candidate: Candidate, reason: str) -> None:
        logger.warning("refused a connection from %s: %s", candidate.host, reason)
        del self._candidates[candidate.end]
        candidate.end.close()

    def _add(self, channel: Channel, host: str) -> None:
        other = self._halves.pop(channel.rank, None)
        if other is None or other.is_beats == channel.is_beats:
            self._halves[channel.rank] = channel
            return
        orders, beats = (other, channel) if channel.is_beats else (channel, other)
        self.ranks.append(JoinedRank(orders.connection, beats.connection, host))
        logger.info("%d of %d ranks have joined at %s", *self._progress())

    def _drop_those_that_left(self) -> None:
        for rank in [rank for rank in self.ranks if rank.has_left]:
            logger.warning("a rank on %s left before all had joined", rank.host)
            rank.close()
            self.ranks.remove(rank)

    def _progress(self) -> tuple[int, int, MeetingPoint]:
        return len(self.ranks), self._count, self._place

    def _missing(self, timeout_s: float) -> str:
        missing = quantity(self._count - len(self.ranks), "rank")
        return (
            f"{missing} of other machines did not join at {self._place} within {timeout_s:g} s; "
            "run `longshore join` on each of them, with this model, the same properties and the "
            f"same {KEY_VARIABLE}, and let them reach this address"
        )
