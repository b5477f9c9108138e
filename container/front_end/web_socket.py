"""SageMaker's bidirectional streams: a WebSocket whose messages are requests to /invocations.

Each message becomes a WSGI request with the headers of the upgrade request, so that limits, keys
and hooks apply as they do to HTTP. Messages are answered one after the other. A second greenlet
reads meanwhile: it answers pings, queues messages and notices that the client has left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import gevent
import msgspec
from gevent.lock import Semaphore
from gevent.queue import Queue
from werkzeug.wrappers import Response as WSGIResponse
from wsproto import ConnectionType
from wsproto.connection import Connection, ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Event, Message, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError

from container.front_end.connections import Connections
from container.http.deadline import ArrivalTimeoutError
from container.http.off_loop import Turns
from core.configuration.limits import SOCKET_IDLE, SOCKET_MESSAGES
from core.configuration.options import ServerOptions
from core.errors import OverloadedError, RequestError

if TYPE_CHECKING:
    from container.front_end.arrival import Arrival

logger = logging.getLogger(__name__)

_UPGRADE_HEADERS = ("HTTP_CONNECTION", "HTTP_UPGRADE", "HTTP_SEC_WEBSOCKET_")
"""Prefixes of the headers that concern the upgrade only, and that messages do not inherit."""
_INTERNAL_ERROR = CloseConnection(CloseReason.INTERNAL_ERROR, "internal error")
_STREAMS = ("text/event-stream", "application/jsonlines")


class _Body:
    """A message, which is read as a request's body."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.length = 0
        """Bytes of the whole message, even if it was not kept."""
        self.refusal: OverloadedError | None = None
        """The error of a message that was not kept. `read` raises it, as other bodies do."""
        self._num_read = 0

    def read(self, size: int = -1) -> bytes:
        if self.refusal is not None:
            raise self.refusal
        end = len(self.data) if size < 0 else self._num_read + size
        data = bytes(self.data[self._num_read : end])
        self._num_read += len(data)
        return data


class WebSocket:
    """A connection after its upgrade."""

    def __init__(
        self,
        connection: Arrival,
        app: Any,
        connections: Connections,
        server: ServerOptions,
        count_refusal: Callable[[int], None],
        is_alive: Callable[[], bool],
        early: bytes = b"",
    ) -> None:
        """count_refusal: counts, by its status, an error that `app` does not see.

        is_alive: whether the server accepts further requests. early: bytes that were read together
        with the upgrade request.
        """
        assert connection.upgraded is not None
        self._connection = connection
        self._app = app
        self._connections = connections
        self._server = server
        self._count_refusal = count_refusal
        self._is_alive = is_alive
        self._protocol = Connection(ConnectionType.SERVER, trailing_data=early)
        self._send_lock = Semaphore()
        self._arrived: Queue[_Body | CloseConnection | None] = Queue(SOCKET_MESSAGES.maximum)
        """Messages to answer, then how to close the socket. None only wakes `_next`: after a ping,
        or when the client has left."""
        self._message: _Body | None = None
        """The message of which only a part has arrived."""
        self._deadline = 0.0
        """The time by which the rest of that message must have arrived."""
        self._has_left = False
        self._reply: CloseConnection | None = None
        """The answer to the client's closing frame."""
        self._reader: gevent.Greenlet[[], None] = gevent.Greenlet(self._read)
        kept = {
            name: value
            for name, value in connection.upgraded.items()
            if not name.startswith(_UPGRADE_HEADERS)
        }
        self._environ: dict[str, Any] = {
            **kept,
            "gunicorn.socket": self,
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/invocations",
            "CONTENT_TYPE": "application/json",
        }

    def fileno(self) -> int:
        """Return the connection's file descriptor, or -1 once the client has left.

        `disconnect_check` needs it.
        """
        return -1 if self._has_left else self._connection.fileno()

    def serve(self) -> None:
        """Answer messages until either side closes the socket, and send the closing frame."""
        self._reader.start()
        try:
            self._send(self._answer_all())
        except (OSError, LocalProtocolError):  # the client does not read, or has left
            pass
        except Exception:
            logger.exception("event=failed")
            self._send(_INTERNAL_ERROR)
        finally:
            self._reader.kill()
            self._connection.release_body()

    def _answer_all(self) -> CloseConnection:
        """Answer messages and return how to close the socket."""
        while self._is_alive() and not self._has_left:
            arrived = self._next()
            if isinstance(arrived, CloseConnection):
                return arrived
            if arrived is not None:
                self._answer(arrived)
                self._connection.release(len(arrived.data))
        return self._reply or CloseConnection(CloseReason.GOING_AWAY, "the server is stopping")

    def _next(self) -> _Body | CloseConnection | None:
        """Wait for a message and return it.

        Returns how to close the socket if it must close, and None if something else ends the wait.
        """
        began = time.monotonic()
        with self._connections.idle(SOCKET_IDLE.maximum):
            return self._arrived.get()
        if time.monotonic() - began < SOCKET_IDLE.maximum:
            reason = "the server is stopping, or has too many connections"
            return CloseConnection(CloseReason.GOING_AWAY, reason)
        reason = f"nothing arrived for {SOCKET_IDLE.maximum} s"
        return CloseConnection(CloseReason.POLICY_VIOLATION, reason)

    def _answer(self, body: _Body) -> None:
        """Answer a message with one message, or with several if the response is a stream."""
        environ = {**self._environ, "wsgi.input": body, "CONTENT_LENGTH": str(body.length)}
        with (
            WSGIResponse.from_app(self._app, environ) as response,
            suppress(LocalProtocolError),  # the client has closed the socket
        ):
            for text in _texts(response):
                self._send(TextMessage(text))

    def _send(self, event: Event) -> None:
        """Send a frame. Raises LocalProtocolError if the socket is closed, or OSError."""
        with self._send_lock:
            self._connection.sendall(self._protocol.send(event))

    def _read(self) -> None:
        """Handle frames until the client leaves or may send no more."""
        turns = Turns()
        try:
            while not self._has_left:
                for event in self._protocol.events():
                    close = self._handle(event)
                    if close is not None:
                        return self._arrived.put(close)
                    turns.give()
                if not self._has_left:
                    self._receive()
        except TimeoutError:
            self._count_refusal(ArrivalTimeoutError.status)
            reason = "the message did not arrive in time (option.body_timeout)"
            self._arrived.put(CloseConnection(CloseReason.POLICY_VIOLATION, reason))
        except (OSError, LocalProtocolError):
            self._leave()
        except Exception:
            logger.exception("event=failed")
            self._arrived.put(_INTERNAL_ERROR)

    def _receive(self) -> None:
        is_within = self._message is not None
        remaining_s = max(0.0, self._deadline - time.monotonic()) if is_within else None
        data = self._connection.recv_within(remaining_s)
        if data:
            self._protocol.receive_data(data)
        else:
            self._leave()

    def _leave(self) -> None:
        """Let the running request and `_answer_all` notice that the client has left."""
        self._has_left = True
        self._arrived.put(None)

    def _handle(self, event: Event) -> CloseConnection | None:
        """Handle a frame. Returns how to close the socket if the client may send no more."""
        match event:
            case Ping():
                self._send(event.response())
                if self._arrived.empty():
                    self._arrived.put(None)
            case CloseConnection() if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                self._reply = event.response()
                self._leave()
            case CloseConnection():  # the frame is malformed
                self._count_refusal(RequestError.status)
                return event
            case TextMessage():
                return self._add(event.data.encode(), event)
            case BytesMessage():
                return self._add(event.data, event)
            case _:  # a pong
                pass
        return None

    def _add(self, data: bytes | bytearray, part: Message[Any]) -> CloseConnection | None:
        """Add a part to the message, and queue the message with its last part."""
        if self._message is None:
            self._message = _Body()
            self._deadline = time.monotonic() + self._server.body_timeout
        message = self._message
        message.length += len(data)
        if message.length > self._server.max_request_size:
            self._count_refusal(413)
            limit = self._server.max_request_size
            reason = f"the message exceeds the limit of {limit} bytes; max_request_size sets it"
            return CloseConnection(CloseReason.MESSAGE_TOO_BIG, reason)
        try:
            if message.refusal is None:
                self._connection.hold(len(data), held=len(message.data))
                message.data += data
        except OverloadedError as error:
            self._connection.release(len(message.data))
            message.data, message.refusal = bytearray(), error
        if part.message_finished:
            self._message = None
            self._arrived.put(message)
        return None


def _texts(response: WSGIResponse) -> Iterator[str]:
    if response.status_code >= 400:
        yield _error_text(response)
    elif response.mimetype in _STREAMS:
        yield from _records(response.iter_encoded(), is_sse=response.mimetype == _STREAMS[0])
    else:
        yield response.get_data(as_text=True).rstrip("\n")


def _records(parts: Iterable[bytes], *, is_sse: bool) -> Iterator[str]:
    """Yield the records of a stream: its lines, or the data of its server-sent events."""
    prefix = b"data:" if is_sse else b""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            record = line.removeprefix(prefix).strip() if line.startswith(prefix) else b""
            if record:
                yield record.decode()


def _error_text(response: WSGIResponse) -> str:
    """Return an error's JSON, with its status in `code`."""
    body = response.get_data()
    try:
        fields = msgspec.json.decode(body, type=dict[str, object])
    except msgspec.MsgspecError:  # a hook's response
        fields = {"error": body.decode("utf-8", "replace")}
    return msgspec.json.encode({**fields, "code": response.status_code}).decode()
