"""An HTTP client of an ASGI application in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


class Exchange:
    """One request to an application, and the messages that it has sent so far."""

    def __init__(
        self,
        method: str = "POST",
        path: str = "/invocations",
        *,
        headers: Sequence[tuple[bytes, bytes]] = ((b"host", b"here"),),
        body: Sequence[bytes] = (b"",),
        query: bytes = b"",
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": list(headers),
        }
        self._incoming = asyncio.Queue[dict[str, Any]]()
        for place, piece in enumerate(body):
            more = place < len(body) - 1
            self._incoming.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    async def run(self, application: Any) -> Exchange:
        await application(self.scope, self._incoming.get, self._send)
        return self

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [tuple(header) for header in self.sent[0]["headers"]]

    @property
    def pieces(self) -> list[bytes]:
        """The pieces of the body, without the empty ones."""
        return [message["body"] for message in self.sent[1:] if message["body"]]

    @property
    def is_complete(self) -> bool:
        return bool(self.sent[1:]) and not self.sent[-1]["more_body"]

    async def wait_for_piece(self) -> None:
        while not self.pieces:
            await asyncio.sleep(0)

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
