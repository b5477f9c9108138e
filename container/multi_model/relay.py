"""Hands a request on to the container of its model, and the answer back, as they are."""

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

from container.http.disconnect import disconnect_check
from container.http.patience import LOOK_INTERVAL_S, ClientGoneError
from container.multi_model.connection import UnixConnection
from core.errors import EngineUnavailableError

_PIECE_BYTES = 2**16
_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
"""Headers that concern one connection alone (RFC 9110, section 7.6.1)."""


class _Relayed(Response):
    default_mimetype = None  # none where the model's container gave none


def relay(socket: Path, target: str) -> Response:
    """The answer to the current request from the server on a socket; target: path and query there.

    It comes as it is made. A client that goes away takes its request at the server with it. Raises
    EngineUnavailableError where the server ends before the first byte of the answer's body.
    """
    exchange = _Exchange(socket)
    try:
        return exchange.begin(target)
    except BaseException as error:
        exchange.end()
        if exchange.client_has_gone or isinstance(error, ClientDisconnected):
            raise ClientGoneError("the client has gone") from None
        if isinstance(error, OSError | HTTPException):
            raise EngineUnavailableError("the model's container is lost; try again") from None
        raise


class _Exchange:
    """One request to the server, and its answer."""

    def __init__(self, socket: Path) -> None:
        self.client_has_gone = False
        self._connection = UnixConnection(socket)
        self._has_hung_up = disconnect_check(request.environ)
        self._watch: gevent.Greenlet[[], None] = gevent.spawn(self._watch_client)

    def begin(self, target: str) -> Response:
        # Where the server answers before it has read all, such as with a 413, it may hang up too.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.request(request.method, target, _body(), _headers())
        answer = self._connection.getresponse()
        pieces = self._pieces(answer)
        first = next(pieces, b"")
        # These have no body, whatever they say of its length.
        length = ("content-length",) if answer.status in (204, 304) else ()
        dropped = {*_HOP_BY_HOP, *length}
        headers = [each for each in answer.getheaders() if each[0].lower() not in dropped]
        status = f"{answer.status} {answer.reason}"
        response = _Relayed(chain([first], pieces), status, headers)
        response.call_on_close(self.end)
        return response

    def end(self) -> None:
        self._watch.kill(block=False)
        self._connection.close()

    def _pieces(self, answer: HTTPResponse) -> Iterator[bytes]:
        """The body; raises ConnectionResetError where it is cut off, as its client is to see."""
        left = answer.length
        try:
            while piece := answer.read1(_PIECE_BYTES):
                left = None if left is None else left - len(piece)
                yield piece
        except HTTPException:
            raise _cut_off() from None
        if left:
            raise _cut_off()

    def _watch_client(self) -> None:
        while not self._has_hung_up():
            gevent.sleep(LOOK_INTERVAL_S)
        self.client_has_gone = True
        with suppress(OSError):
            self._connection.hang_up()


def _cut_off() -> ConnectionResetError:
    """Has the server end the client's connection without a last chunk, or short of its length."""
    return ConnectionResetError(errno.ECONNRESET, "the model's container is lost")


def _headers() -> dict[str, str]:
    passed = {name: text for name, text in request.headers if name.lower() not in _HOP_BY_HOP}
    return {**passed, "Connection": "close"}


def _body() -> Iterator[bytes] | None:
    if request.content_length is None and not request.environ.get("HTTP_TRANSFER_ENCODING"):
        return None
    return iter(lambda: request.stream.read(_PIECE_BYTES), b"")
