"""Streamed handler answers: generators and `Output.add_stream_content`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.tasks.handlers.answer import to_answer
from engine.tasks.handlers.djl_python import Output
from engine.tasks.performer import Answer, Job

_JSON_LINES = "application/jsonlines"
_SENT_UNCHANGED = (str, bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer whose parts are sent as they are produced.

    Text and bytes are sent unchanged, an Output as its content, anything else as a line of JSON.
    The first part sets status and headers: those of an Output, or else those of `head`.
    """

    parts: Iterator[Any] | AsyncIterator[Any]
    head: Output
    """Gives status and headers to parts that are not Outputs."""

    def send(self, job: Job) -> Answer:
        """Send all parts of a sync stream. Return the last answer without its body, which was sent.

        Stops early, and closes the generator, once `job.send` returns False. Raises what the parts
        raise.
        """
        assert isinstance(self.parts, Iterator)
        last = self._part(b"")
        for part in self.parts:
            last = self._part(part)
            if not job.send(last):
                if hasattr(self.parts, "close"):
                    self.parts.close()  # pyright: ignore[reportAttributeAccessIssue]
                break
        return replace(last, body=b"")

    async def send_async(self, job: Job) -> Answer:
        """Do the same as `send` for a sync or async stream."""
        if isinstance(self.parts, Iterator):
            return self.send(job)
        last = self._part(b"")
        async for part in self.parts:
            last = self._part(part)
            if not job.send(last):
                if hasattr(self.parts, "aclose"):
                    await self.parts.aclose()  # pyright: ignore[reportAttributeAccessIssue]
                break
        return replace(last, body=b"")

    def _part(self, part: Any) -> Answer:
        if isinstance(part, Output):
            return to_answer(part)
        is_unchanged = isinstance(part, _SENT_UNCHANGED)
        output = Output(self.head.code, self.head.message).add(part)
        output.properties = {} if is_unchanged else {"Content-Type": _JSON_LINES}
        output.properties |= self.head.properties
        answer = to_answer(output)
        return answer if is_unchanged else replace(answer, body=answer.body + b"\n")


def as_stream(result: Any) -> Stream | None:
    """Return a handler's result as a stream, or None if it is not one."""
    if isinstance(result, Output):
        parts = result.stream_content
        return None if parts is None else Stream(_iterate(parts), result)
    if isinstance(result, Iterator | AsyncIterator):
        return Stream(result, Output())
    return None


def _iterate(parts: Any) -> Iterator[Any] | AsyncIterator[Any]:
    return aiter(parts) if isinstance(parts, AsyncIterable) else iter(parts)
