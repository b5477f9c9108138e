"""Answers of the user's code that come in parts: generators, and `Output.add_stream_content`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from djl_python import Output
from engine.tasks.handlers.answer import answer_of
from engine.tasks.performer import Answer, Job

_LINES = "application/jsonlines"
_AS_THEY_ARE = (str, bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True)
class Stream:
    """Parts that are sent as they come. Text and bytes go out as they are, an Output as its
    content, anything else as a line of JSON; status and headers are those of the first part."""

    parts: Iterator[Any] | AsyncIterator[Any]
    head: Output
    """Whose status and headers count for parts that are no Output."""

    def send(self, job: Job) -> Answer:
        """Sends all of a stream that is not async; its end. Raises what the parts raise."""
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
        """The same for one that is or is not."""
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
            return answer_of(part)
        is_text = isinstance(part, _AS_THEY_ARE)
        output = Output(self.head.code, self.head.message).add(part)
        output.properties = {} if is_text else {"Content-Type": _LINES}
        output.properties |= self.head.properties
        answer = answer_of(output)
        return answer if is_text else replace(answer, body=answer.body + b"\n")


def stream_of(result: Any) -> Stream | None:
    """What a handler returned, where that is a stream."""
    if isinstance(result, Output):
        parts = result.stream_content
        return None if parts is None else Stream(_begun(parts), result)
    if isinstance(result, Iterator | AsyncIterator):
        return Stream(result, Output())
    return None


def _begun(parts: Any) -> Iterator[Any] | AsyncIterator[Any]:
    return aiter(parts) if isinstance(parts, AsyncIterable) else iter(parts)
