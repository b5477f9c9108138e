"""A client's connection, with limits on how slowly its requests arrive and its responses are read.

gunicorn reads and writes through `Arrival` as it would through the socket. Between two reads, other
connections get a turn. So no body, however it is cut into chunks, holds up the event loop.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol

import gevent
from gevent.ssl import SSLSocket
from gunicorn.http.body import Body, ChunkedReader
from gunicorn.http.errors import NoMoreData, ParseException
from gunicorn.http.message import Request
from gunicorn.http.unreader import Unreader

from container.front_end.body_memory import BodyMemory
from container.front_end.connections import silent_timeout
from container.http.deadline import ArrivalTimeoutError, ClientGoneError
from core.configuration.limits import CHUNKS, UNREAD_BYTES
from core.configuration.options import ServerOptions
from core.errors import RequestError

logger = logging.getLogger(__name__)

READ_BYTES = 2**18
"""At most this much is read at once. gunicorn makes several copies of what it reads."""
MIN_READ_RATE = 2**14
"""Bytes per second at which a client must read a response whose buffer is full."""
DRAIN_BYTES = 2**25
"""Limit for reading the rest of a body after the response. If more follows, the connection ends."""
DRAIN_S = 2.0
"""Time limit for reading the rest of a body, and for reading on while the connection ends."""

Clock = Callable[[], float]


class Socket(Protocol):
    """The methods of gevent's sockets that are used here."""

    def recv(self, size: int) -> bytes: ...
    def send(
        self, data: memoryview | bytes, flags: int = 0, timeout: float | None = None
    ) -> int: ...
    def shutdown(self, how: int) -> None: ...
    def settimeout(self, timeout: float | None) -> None: ...
    def setsockopt(self, level: int, option: int, value: int) -> None: ...


class Outbox:
    """Sends the chunks of a step one right after the other, once all are written.

    The code that writes them and the kernel's stay in the caches, and a client of many streams
    wakes up once.
    """

    def __init__(self) -> None:
        self._waiting: list[Arrival] = []

    def add(self, arrival: Arrival) -> None:
        """Send what the connection has not sent in the loop's next turn."""
        if not self._waiting:
            gevent.get_hub().loop.run_callback(self._send_all)
        self._waiting.append(arrival)

    def _send_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for arrival in waiting:
            arrival.send_unsent()


class SlowReaderError(BrokenPipeError):
    """The client does not read its response."""

    def __init__(self) -> None:
        super().__init__(errno.EPIPE, "the client does not read its response")


class Arrival:
    """A socket whose reads and writes have deadlines. Other methods are the socket's own."""

    def __init__(
        self,
        client: Socket,
        server: ServerOptions,
        memory: BodyMemory,
        clock: Clock = time.monotonic,
        enter: Callable[[], None] = lambda: None,
        outbox: Outbox | None = None,
    ) -> None:
        """enter: waits until a request other than a GET may begin."""
        self._enter = enter
        self._outbox = outbox or Outbox()
        self._client = client
        self._server = server
        self._memory = memory
        self._clock = clock
        self._deadline: float | None = None
        self._part: Literal["head", "body", "rest"] = "head"
        self._num_held = 0
        self._is_first_read = True
        self._unsent = b""
        self._is_behind = False
        """Whether the client has not read what was sent before `_unsent`."""
        self.upgraded: Mapping[str, Any] | None = None
        """The WSGI environment of the request that turned this connection into a WebSocket, or None
        if the connection still carries HTTP."""
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES.maximum // 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def expect_head(self) -> None:
        """Expect the head of the next request. Its time limit starts with its first byte."""
        self._part, self._deadline, self._is_first_read = "head", None, True

    def expect_body(self) -> None:
        """Start the time limit of a body. Its bytes count as held until `release_body`."""
        self._begin("body", self._server.body_timeout)

    def release_body(self) -> None:
        """Stop counting the body's bytes as held: its request has ended."""
        self.release(self._num_held)

    def hold(self, num_bytes: int, *, held: int) -> None:
        """Count more bytes of a body as held. `held`: bytes of the same body held already.

        Raises OverloadedError if there is no memory for them.
        """
        self._memory.take(num_bytes, held=held)
        self._num_held += num_bytes

    def release(self, num_bytes: int) -> None:
        """Stop counting bytes that `hold` counted."""
        self._memory.release(num_bytes)
        self._num_held -= num_bytes

    def drain(self, body: ArrivingBody) -> bool:
        """Read the rest of a body.

        Return False if it is malformed, too long or too slow, or if no HTTP may follow it.
        """
        if self.upgraded is not None:
            return False
        self._begin("rest", DRAIN_S)
        try:
            left = DRAIN_BYTES
            while left > 0 and not body.failed:
                data = body.read(min(left, READ_BYTES))
                if not data:
                    return True
                left -= len(data)
        except (RequestError, ArrivalTimeoutError, ClientGoneError, OSError):
            pass
        return False

    def linger(self) -> None:
        """End the connection, but read on for a while.

        If it were closed with data unread, the client might never see the response.
        """
        self._begin("rest", DRAIN_S)
        with suppress(ArrivalTimeoutError, OSError):
            self._client.shutdown(socket.SHUT_WR)
            while self.recv(READ_BYTES):
                pass

    def recv(self, size: int) -> bytes:
        """Read what has arrived, at most `size` bytes.

        Raises ArrivalTimeoutError when the time limit has passed, OverloadedError if there is no
        memory for more of the body.
        """
        if not self._is_first_read:
            gevent.sleep(0)
        self._client.settimeout(self._remaining())
        try:
            data = self._client.recv(min(size, READ_BYTES))
        except TimeoutError:
            raise self._timeout_error() from None
        finally:
            self._client.settimeout(None)
        if self._is_first_read and data and self._part == "head":
            _refuse_other_protocols(data)
            if not data.startswith(b"GET "):
                self._enter()
            self._begin("head", self._server.header_timeout)
        self._is_first_read = False
        if self._part == "body":
            self.hold(len(data), held=self._num_held)
        return data

    def recv_within(self, timeout_s: float | None) -> bytes:
        """Read what arrives within a time, while another greenlet may send.

        Raises TimeoutError when nothing has arrived.
        """
        gevent.sleep(0)
        with silent_timeout(timeout_s):
            while True:
                # A send of another greenlet sets a timeout on the socket, which may end this read.
                with suppress(TimeoutError):
                    return self._client.recv(READ_BYTES)
        raise TimeoutError

    def sendall(self, data: bytes) -> None:
        """Send all data.

        Raises SlowReaderError if the client reads nothing for `write_timeout`, or if sending takes
        longer than `write_timeout` plus the time that the data takes at MIN_READ_RATE.

        The kernel buffers up to `UNREAD_BYTES` that the client has not read.
        """
        limit_s = self._server.write_timeout + len(data) / MIN_READ_RATE
        deadline = self._clock() + limit_s
        view = memoryview(self._unsent + data)
        self._unsent, self._is_behind = b"", False
        try:
            while view:
                remaining_s = deadline - self._clock()
                self._client.settimeout(min(max(remaining_s, 0.001), self._server.write_timeout))
                view = view[self._client.send(view) :]
        except TimeoutError:
            logger.warning("event=cut_off reason='the client does not read its response'")
            raise SlowReaderError from None
        finally:
            self._client.settimeout(None)

    @property
    def send_chunk(self) -> Callable[[bytes], bool] | None:
        """Sends a chunk of HTTP/1.1 in the loop's next turn, without waiting; None with TLS.

        Returns False if the client is behind: the next `sendall` sends what is left.
        """
        return None if isinstance(self._client, SSLSocket) else self._send_chunk

    def _send_chunk(self, data: bytes) -> bool:
        if not self._unsent:
            self._outbox.add(self)
        self._unsent = b"%b%X\r\n%b\r\n" % (self._unsent, len(data), data)
        return not self._is_behind

    def send_unsent(self) -> None:
        """Send what `send_chunk` left, as far as the socket takes it. Only `Outbox` calls this."""
        if not self._unsent:
            return  # `sendall` has sent it
        try:
            num_sent = self._client.send(self._unsent, 0, 0.0)
        except OSError:
            num_sent = 0  # the next `sendall` raises what is wrong
        self._unsent = self._unsent[num_sent:]
        self._is_behind = bool(self._unsent)

    def _begin(self, part: Literal["head", "body", "rest"], timeout_s: float) -> None:
        self._part, self._deadline = part, self._clock() + timeout_s

    def _remaining(self) -> float | None:
        if self._deadline is None:
            return None
        remaining_s = self._deadline - self._clock()
        if remaining_s <= 0:
            raise self._timeout_error()
        return remaining_s

    def _timeout_error(self) -> ArrivalTimeoutError:
        option = "header_timeout" if self._part == "head" else "body_timeout"
        return ArrivalTimeoutError(f"the {self._part} did not arrive in time (option.{option})")


def _refuse_other_protocols(data: bytes) -> None:
    """Raise RequestError if these bytes cannot begin an HTTP request, such as those of TLS."""
    if data[0] >= 0x7F or (data[0] < 0x20 and data[0] not in b"\r\n"):
        raise RequestError("request", "is not HTTP")


class ArrivingBody(Body):
    """A request's body. Malformed chunks, or too many of them, count as errors of the client."""

    failed: bool
    """Whether reading raised an error. gunicorn's Body sets it."""

    @classmethod
    def of(cls, request: Request) -> ArrivingBody:
        """Take over the body of gunicorn's request, before any of it is read."""
        assert request.body is not None, "gunicorn makes the body with the request"
        reader = request.body.reader
        if isinstance(reader, ChunkedReader):
            reader = _CountedChunks(request, request.unreader)
        return cls(reader)

    def read(self, size: int | None = None) -> bytes:
        """Read as `Body.read` does.

        Raises RequestError if the body is malformed and ClientGoneError if it is cut off.
        """
        try:
            return super().read(size)
        except ParseException as error:
            raise RequestError("body", f"is malformed: {error}") from None
        except NoMoreData:
            raise ClientGoneError from None


class _CountedChunks(ChunkedReader):
    def __init__(self, request: Request, unreader: Unreader) -> None:
        super().__init__(request, unreader)
        self._num_chunks = 0

    def parse_chunk_size(self, unreader: Unreader, data: bytes | None = None) -> Any:
        self._num_chunks += 1
        CHUNKS.check("body", self._num_chunks)
        return super().parse_chunk_size(unreader, data)
