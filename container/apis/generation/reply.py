"""The response to a request for text, from one or several generations: a document or a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import msgspec

from container.http.failures import Failure
from core.text.answers import Delta

Record = dict[str, object]
"""A JSON object: one line, or one server-sent event, of a stream."""
StreamRecord = Record | bytes
"""A record of a stream; bytes are its JSON."""


def decoded(record: StreamRecord) -> Record:
    """Return a record of a stream as an object."""
    return msgspec.json.decode(record, type=Record) if isinstance(record, bytes) else record


class Format(ABC):
    """The names and shapes that an API gives to the answers of a request.

    Answers have numbers: those to the second prompt of a request follow those to its first.
    """

    ends_with_done: ClassVar[bool] = False
    """Whether a stream of server-sent events ends with OpenAI's `data: [DONE]`."""

    def begin(self, index: int) -> Sequence[StreamRecord]:
        """Return the records that precede an answer's first delta."""
        return []

    @abstractmethod
    def delta(self, delta: Delta) -> Sequence[StreamRecord]:
        """Return the records for new tokens of an answer."""

    def end(self, index: int) -> Sequence[StreamRecord]:
        """Return the records that follow an answer's last delta."""
        return []

    def last(self) -> Sequence[StreamRecord]:
        """Return the records that follow all answers."""
        return []

    @abstractmethod
    def document(self) -> object:
        """Return the response to a request without a stream, once all answers have ended."""

    @abstractmethod
    def failure(self, failure: Failure) -> Record:
        """Return the last record of a stream that failed."""


class ApiResponse(Protocol):
    """The response to one request, as `stream.send` sends it."""

    stream: bool
    """Whether the client asked for a stream."""
    ends_with_done: bool
    """As in `Format`."""

    def document(self) -> object:
        """Run the generations and return the document. Raises what `Generation.deltas` raises."""
        ...

    def records(self) -> Iterator[Sequence[StreamRecord | str]]:
        """Yield records as tokens arrive. A str is sent unchanged.

        Raises what `Generation.deltas` raises.
        """
        ...

    def failure(self, failure: Failure) -> Record:
        """Return the last record of a stream that failed."""
        ...

    def abort(self) -> None:
        """Abort the generations that are still running in the engine."""
        ...


class Deltas(Protocol):
    """What a reply needs of a `Generation`, or of several that answer as one."""

    def deltas(self, *, may_wait: bool = False) -> Iterator[Delta]:
        """Yield new tokens as `Generation.deltas` does, and raise what it raises."""
        ...

    def divert(self, take: Callable[[Delta], bool]) -> None:
        """Give `take` the deltas that arrive while `deltas` waits, as `TokenStream.divert` does."""
        ...

    def abort(self) -> None:
        """Abort what is still running in the engine."""
        ...


class Reply:
    """Runs the generation of a request. If it fails, the reply fails."""

    def __init__(self, format: Format, generation: Deltas, *, stream: bool) -> None:
        self.stream = stream
        self.ends_with_done = format.ends_with_done
        self.failure = format.failure
        self._format = format
        self._generation = generation
        self._begun: set[int] = set()
        """Indices of the answers that have begun."""

    def document(self) -> object:
        for _ in self._generation.deltas(may_wait=True):
            pass
        return self._format.document()

    def abort(self) -> None:
        self._generation.abort()

    def records(self) -> Iterator[Sequence[StreamRecord]]:
        for delta in self._generation.deltas():
            yield self._records_of(delta)
        yield self._format.last()

    def divert(self, take: Callable[[Sequence[StreamRecord]], bool]) -> None:
        """Give `take` the records that arrive while `records` waits, as `TokenStream.divert`."""
        self._generation.divert(lambda delta: take(self._records_of(delta)))

    def _records_of(self, delta: Delta) -> Sequence[StreamRecord]:
        if delta.index in self._begun and delta.finish is None:
            return self._format.delta(delta)
        records: list[StreamRecord] = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            records += self._format.begin(delta.index)
        records += self._format.delta(delta)
        if delta.finish is not None:
            records += self._format.end(delta.index)
        return records
