"""A server on a Unix socket that answers with given bytes, and keeps what it has received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Twice: 1\r\nX-Twice: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
CHUNKS = (b"3\r\none\r\n", b"3\r\ntwo\r\n")
LAST_CHUNK = b"0\r\n\r\n"


class FakeContainer:
    """Sends one answer to each connection, piece by piece, and then closes it."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.received: list[bytes] = []
        self.has_hung_up = asyncio.Event()
        """Set when a client closes its connection before the answer is complete."""
        self.may_go_on = asyncio.Event()
        """Set it to let the pieces after the first two be sent."""
        self._pieces = pieces

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        self.received.append(head + await reader.readexactly(int(length or 0)))
        for place, piece in enumerate(self._pieces):
            if place == 2 and not await self._waits(reader):
                break
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def _waits(self, reader: asyncio.StreamReader) -> bool:
        """Wait for `may_go_on`; return False if the client leaves first."""
        leaving = asyncio.ensure_future(reader.read(1))
        going_on = asyncio.ensure_future(self.may_go_on.wait())
        await asyncio.wait((leaving, going_on), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.has_hung_up.set()
        for task in (leaving, going_on):
            task.cancel()
        return not self.has_hung_up.is_set()


@asynccontextmanager
async def fake_container(socket: Path, *pieces: bytes) -> AsyncIterator[FakeContainer]:
    """Serve on the socket during the block."""
    container = FakeContainer(pieces)
    async with await asyncio.start_unix_server(container.answer, socket):
        yield container
