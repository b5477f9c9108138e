"""Forwards a request to the container of its model, and relays the response unchanged."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from itertools import chain
from pathlib import Path

import gevent
from flask import Response, request
from werkzeug.exceptions import ClientDisconnected

from container.http.client_connection import disconnect_check
from container.http.deadline import CLIENT_CHECK_INTERVAL_S, ClientGoneError
from container.multi_model.model_container import UnixConnection
from core.errors import EngineUnavailableError
from core.process.http_headers import HOP_BY_HOP

_PIECE_BYTES = 2**16
_OWN_HEADERS = ("date", "server")
"""Headers of a response that our server sets, in place of the model's."""


class _Relayed(Response):
    default_mimetype = None  # no Content-Type unless the model's container sent one


def relay(socket: Path, target: str) -> Response:
    """Forward Flask's current request to the server on a Unix socket; stream the response.

    `target` is the path and query at the server. If the client disconnects, the connection to the
    server is closed too. Raises EngineUnavailableError if the server ends before the first byte of
    the response body, and ClientGoneError if the client has disconnected by then.
    """
    exchange = _Exchange(socket)
    try:
        return exchange.begin(target)
    except BaseException as error:
        exchange.end()
        if exchange.client_disconnected or isinstance(error, ClientDisconnected):
            raise ClientGoneError from None
        if isinstance(error, OSError | HTTPException):
            raise EngineUnavailableError("the model's container has ended; try again") from None
        raise


class _Exchange:
    """One request to the server, and its response."""

    def __init__(self, socket: Path) -> None:
        self.client_disconnected = False
        self._connection = UnixConnection(socket)
        self._has_hung_up = disconnect_check(request.environ)
        self._watch: gevent.Greenlet[[], None] = gevent.spawn(self._watch_client)

    def begin(self, target: str) -> Response:
        # The server may respond before it has read the whole body (with 413), and then hang up.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.request(request.method, target, _body(), _headers())
        response = self._connection.getresponse()
        pieces = self._pieces(response)
        first = next(pieces, b"")
        # Responses with status 204 or 304 have no body, whatever their Content-Length says.
        length = ("content-length",) if response.status in (204, 304) else ()
        dropped = {*HOP_BY_HOP, *_OWN_HEADERS, *length}
        headers = [header for header in response.getheaders() if header[0].lower() not in dropped]
        status = f"{response.status} {response.reason}"
        relayed = _Relayed(chain([first], pieces), status, headers)
        relayed.call_on_close(self.end)
        return relayed

    def end(self) -> None:
        self._watch.kill(block=False)
        self._connection.close()

    def _pieces(self, response: HTTPResponse) -> Iterator[bytes]:
        """Yield the body. Raises ConnectionResetError if the body is cut off, so that the client
        gets no complete response either."""
        left = response.length
        try:
            while piece := response.read1(_PIECE_BYTES):
                left = None if left is None else left - len(piece)
                yield piece
        except HTTPException:
            raise _cut_off() from None
        if left:
            raise _cut_off()

    def _watch_client(self) -> None:
        while not self._has_hung_up():
            gevent.sleep(CLIENT_CHECK_INTERVAL_S)
        self.client_disconnected = True
        with suppress(OSError):
            self._connection.hang_up()


def _cut_off() -> ConnectionResetError:
    """Return an error on which our server closes the connection without completing the response."""
    return ConnectionResetError(errno.ECONNRESET, "the model's container has ended")


def _headers() -> dict[str, str]:
    passed = {name: text for name, text in request.headers if name.lower() not in HOP_BY_HOP}
    return {**passed, "Connection": "close"}


def _body() -> Iterator[bytes] | None:
    if request.content_length is None and not request.environ.get("HTTP_TRANSFER_ENCODING"):
        return None
    return iter(lambda: request.stream.read(_PIECE_BYTES), b"")
