"""Clients of the front end, as light as they can be: raw sockets in one loop, and no JSON.

A response counts as complete when its last byte has arrived; nothing else in it is read.
"""

from __future__ import annotations

import resource
import selectors
import socket
import time
from dataclasses import dataclass, field

from benchmarks.cpu.http_server import MeasurementError

LAST_CHUNK = b"\r\n0\r\n\r\n"
RECEIVE_BYTES = 2**18
PING = b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n"
PING_INTERVAL_S = 0.02
LIMIT_S = 300.0


@dataclass(slots=True)
class Load:
    """What the clients saw."""

    seconds: float = 0.0
    client_cpu_s: float = 0.0
    num_chunks: int = 0
    """Chunks of all streams that hold tokens."""
    pings_s: list[float] = field(default_factory=list[float])


class Exchange:
    """A connection, with the response that it is receiving."""

    def __init__(self, port: int, request: bytes) -> None:
        self._request = request
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        self.num_chunks = 0
        self.began = 0.0
        self.is_complete = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def begin(self) -> None:
        """Send the request. It fits into the socket's buffer."""
        self.began = time.perf_counter()
        self._head, self._end = b"", b""
        self._left: int | None = None
        self.is_complete = False
        self._socket.send(self._request)

    def receive(self) -> bool:
        """Read what has arrived. Return whether the response is complete."""
        data = self._socket.recv(RECEIVE_BYTES)
        _require(bool(data), "the front end closed a connection")
        self.is_complete = self._completes(data)
        return self.is_complete

    def _completes(self, data: bytes) -> bool:
        # A chunk begins with its length in a line of its own, then a record of one of the formats.
        self.num_chunks += data.count(b"\r\n{") + data.count(b"\r\ndata: {")
        if not self._end:
            data = self._without_head(data)
        if self._left is not None:
            self._left -= len(data)
            return self._left == 0
        self._end = (self._end + data)[-len(LAST_CHUNK) :]
        return self._end == LAST_CHUNK

    def _without_head(self, data: bytes) -> bytes:
        self._head += data
        head, end, body = self._head.partition(b"\r\n\r\n")
        if not end:
            return b""
        _require(head.startswith(b"HTTP/1.1 200 "), self._head.decode(errors="replace"))
        _, name, rest = head.lower().partition(b"\r\ncontent-length: ")
        self._left = int(rest.split(b"\r\n")[0]) if name else None
        self._end = end
        return body


def load(
    port: int, request: bytes, *, connections: int, requests: int, seconds: float = 0.0
) -> Load:
    """Send requests over connections, each of which sends the next one when it has its answer.

    Meanwhile, another connection asks /ping every PING_INTERVAL_S, for at least `seconds`. Raises
    MeasurementError if a request fails.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    exchanges = [Exchange(port, request) for _ in range(connections)]
    ping = Exchange(port, PING)
    try:
        return _run(exchanges, ping, requests, seconds)
    finally:
        for each in (*exchanges, ping):
            each.close()


def _run(exchanges: list[Exchange], ping: Exchange, requests: int, seconds: float) -> Load:
    found = Load()
    began, cpu_began = time.perf_counter(), time.process_time()
    num_left, num_unsent = requests, requests - len(exchanges)
    with selectors.EpollSelector() as selector:
        for exchange in (ping, *exchanges):
            selector.register(exchange, selectors.EVENT_READ, exchange)
            exchange.begin()
        while num_left or time.perf_counter() < began + seconds:
            _require(time.perf_counter() < began + LIMIT_S, f"{num_left} requests took too long")
            for key, _ in selector.select(PING_INTERVAL_S):
                exchange: Exchange = key.data
                if not exchange.receive():
                    continue
                if exchange is ping:
                    found.pings_s.append(time.perf_counter() - ping.began)
                    continue
                num_left -= 1
                if num_unsent > 0:
                    exchange.begin()
                    num_unsent -= 1
            if ping.is_complete and time.perf_counter() >= ping.began + PING_INTERVAL_S:
                ping.begin()
    found.seconds = time.perf_counter() - began
    found.client_cpu_s = time.process_time() - cpu_began
    found.num_chunks = sum(exchange.num_chunks for exchange in exchanges)
    return found


def _require(holds: bool, failure: str) -> None:
    if not holds:
        raise MeasurementError(failure)
