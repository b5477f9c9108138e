"""The ASGI application in front of the replicas. Its HTTP API is that of one container."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from container.apis.invocations.routing import named_path
from container.apis.table import error_body
from container.http.failures import RETRY_AFTER_S, Failure
from container.http.headers import CUSTOM_ATTRIBUTES
from container.http.health import HEALTH_PATHS
from deploy.fleet.front.metrics import merge_metrics
from deploy.fleet.http_message import (
    HOP_BY_HOP_BYTES,
    Head,
    Headers,
    HttpRequest,
    ReplicaLostError,
    without,
)

logger = logging.getLogger(__name__)

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Parts = AsyncGenerator[Head | bytes]

RETRY_DELAYS_S = (0.1, 0.2, 0.4, 0.8)
"""Pauses between attempts of a request, long enough for Serve to notice that a replica ended."""
PING_TIMEOUT_S = 5.0
"""How long a health check waits for a replica; other requests wait until there is one."""
_SET_BY_SERVE = frozenset((b"date", b"server", b"x-request-id"))
"""Response headers that Serve's proxy sets, in place of the container's."""
_INFERENCE_ID = b"x-amzn-sagemaker-inference-id"


class ClientGoneError(Exception):
    """The client has disconnected."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The calls that a gateway makes to replicas."""

    exchange: Callable[[HttpRequest], Parts]
    """Send a request to a replica; yield the head and the body's pieces as they come.

    Raises ReplicaLostError.
    """
    fetch_from_all: Callable[[HttpRequest], Awaitable[Sequence[tuple[str, Head, bytes]]]]
    """Send a request to all replicas; return the name and the response of those that answer."""


@dataclass(frozen=True, slots=True)
class _Response:
    """A response whose first piece, or whose end, has arrived."""

    head: Head
    first: bytes
    rest: Parts


class Gateway:
    """Passes requests on to replicas, and their responses back unchanged."""

    def __init__(self, replicas: Replicas, max_body_bytes: int) -> None:
        """max_body_bytes: a longer body is cut one byte after this, so the replica refuses it."""
        self._replicas = replicas
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Answer a request, or start and stop with the server (ASGI 3)."""
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send)
        elif scope["type"] == "http":
            try:
                body = await self._read_body(receive)
            except ClientGoneError:
                return
            await self._until_disconnect(self._answer(_request(scope, body), send), receive)

    async def _read_body(self, receive: Receive) -> bytes:
        pieces: list[bytes] = []
        room = self._max_body_bytes + 1
        while room > 0:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            pieces.append(message.get("body", b"")[:room])
            room -= len(pieces[-1])
            if not message.get("more_body", False):
                break
        return b"".join(pieces)

    async def _until_disconnect(self, answer: Awaitable[None], receive: Receive) -> None:
        """Run the answer to its end; cancel it when the client disconnects."""
        answering = asyncio.ensure_future(answer)
        listening = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((answering, listening), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, listening):
                task.cancel()
            await asyncio.gather(answering, listening, return_exceptions=True)

    async def _answer(self, request: HttpRequest, send: Send) -> None:
        try:
            if (request.method, request.path) == ("GET", "/metrics"):
                await self._answer_metrics(request, send)
            elif request.path in HEALTH_PATHS:
                await self._answer_ping(request, send)
            elif _changes_one_container(request):
                await _fail(request, Failure(501, _ADAPTERS_REFUSAL), send)
            else:
                await self._relay(await self._open(request), send)
        except _UnansweredError as error:
            await _fail(request, Failure(503, str(error)), send)

    async def _answer_ping(self, request: HttpRequest, send: Send) -> None:
        try:
            response = await asyncio.wait_for(self._open(request), PING_TIMEOUT_S)
        except TimeoutError:
            raise _UnansweredError("no replica is ready") from None
        await self._relay(response, send)

    async def _answer_metrics(self, request: HttpRequest, send: Send) -> None:
        """Answer with the metrics of all replicas or, if all refuse, with a refusal such as 401."""
        answers = await self._replicas.fetch_from_all(request)
        if not answers:
            raise _UnansweredError("no replica is ready")
        pages = [(name, body) for name, head, body in answers if head.status == 200]
        _, head, body = answers[0]
        if pages:
            _, head, _ = next(answer for answer in answers if answer[1].status == 200)
            body = merge_metrics(pages)
        length = (b"content-length", str(len(body)).encode())
        headers = (*without(head.headers, frozenset((b"content-length",))), length)
        await _send_whole(Head(head.status, headers), body, send)

    async def _open(self, request: HttpRequest) -> _Response:
        """Return a response that has begun.

        The client has received nothing yet. So if the replica ends, the request is tried again:
        generating an answer twice does no harm. Raises _UnansweredError after the last try.
        """
        for delay_s in (*RETRY_DELAYS_S, None):
            parts = self._replicas.exchange(request)
            try:
                head = await anext(parts)
                assert isinstance(head, Head), "the head comes first"
                first = await anext(parts, b"")
                assert isinstance(first, bytes)
                return _Response(head, first, parts)
            except ReplicaLostError as error:
                logger.warning("event=replica_lost path=%s reason=%r", request.path, str(error))
                if delay_s is None:
                    break
                await asyncio.sleep(delay_s)
            except BaseException:
                await parts.aclose()
                raise
        raise _UnansweredError("every replica that got this request has ended; try again")

    async def _relay(self, response: _Response, send: Send) -> None:
        """Pass a response on.

        Raises ReplicaLostError if the replica ends before the response is complete. The server then
        cuts the connection, so that the client does not take a part for the whole.
        """
        async with aclosing(response.rest) as rest:
            await _start(response.head, send)
            await _send_piece(response.first, send)
            async for piece in rest:
                assert isinstance(piece, bytes)
                await _send_piece(piece, send)
        await _end(send)


class _UnansweredError(Exception):
    """No replica has answered."""


_ADAPTERS_REFUSAL = (
    "a request reaches one replica, but an adapter must be in all of them; put it into the "
    "model's folder `adapters` (docs/models.md) and deploy the fleet again"
)


def _changes_one_container(request: HttpRequest) -> bool:
    """Return whether this request would change the container that receives it, and no other."""
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return False
    # The container joins headers of one name, and answers at the path that they name.
    named = named_path(",".join(request.values(CUSTOM_ATTRIBUTES.lower().encode())))
    return _changes_adapters(request.path) or _changes_adapters(named or "")


def _changes_adapters(path: str) -> bool:
    segments = unquote(path).strip("/").split("/")
    return "adapters" in segments or segments[-1].endswith("load_lora_adapter")


def _request(scope: AsgiMessage, body: bytes) -> HttpRequest:
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope.get("query_string", b"")
    headers = without(tuple(tuple(header) for header in scope["headers"]), HOP_BY_HOP_BYTES)
    return HttpRequest(
        scope["method"], path + (b"?" + query if query else b""), _with_id(headers), body
    )


def _with_id(headers: Headers) -> Headers:
    """Add Serve's id of the request for the container, unless the client has given one."""
    names = {name.lower(): value for name, value in headers}
    if _INFERENCE_ID in names or b"x-request-id" not in names:
        return headers
    return (*headers, (_INFERENCE_ID, names[b"x-request-id"]))


async def _run_lifespan(receive: Receive, send: Send) -> None:
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _fail(request: HttpRequest, failure: Failure, send: Send) -> None:
    body = msgspec.json.encode(error_body(failure, request.path))
    headers: Headers = (
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    )
    if failure.code == 503:
        headers = (*headers, (b"retry-after", str(RETRY_AFTER_S).encode()))
    await _send_whole(Head(failure.code, headers), body, send)


async def _send_whole(head: Head, body: bytes, send: Send) -> None:
    await _start(head, send)
    await _send_piece(body, send)
    await _end(send)


async def _start(head: Head, send: Send) -> None:
    headers = without(head.headers, _SET_BY_SERVE)
    await send({"type": "http.response.start", "status": head.status, "headers": list(headers)})


async def _send_piece(piece: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})
