"""The response to a request for text, from one or several generations: a document or a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

from container.apis.generation.generation import Generation
from container.apis.generation.interleaving import interleave
from container.http.failures import Failure
from core.text.answers import Delta

Record = dict[str, object]
"""A JSON object: one line, or one server-sent event, of a stream."""


class Format(ABC):
    """The names and shapes that an API gives to the answers of a request.

    Answers have numbers: those to the second prompt of a request follow those to its first.
    """

    ends_with_done: ClassVar[bool] = False
    """Whether a stream of server-sent events ends with OpenAI's `data: [DONE]`."""

    def begin(self, index: int) -> list[Record]:
        """Return the records that precede an answer's first delta."""
        return []

    @abstractmethod
    def delta(self, delta: Delta) -> list[Record]:
        """Return the records for new tokens of an answer."""

    def end(self, index: int) -> list[Record]:
        """Return the records that follow an answer's last delta."""
        return []

    def last(self) -> list[Record]:
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

    def records(self) -> Iterator[Sequence[Record | str]]:
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


class Reply:
    """Runs the generations of a request, one for each prompt. If one fails, the reply fails."""

    def __init__(self, format: Format, *generations: Generation, stream: bool) -> None:
        self.stream = stream
        self.ends_with_done = format.ends_with_done
        self.failure = format.failure
        self._format = format
        self._generations = generations

    def document(self) -> object:
        for _ in interleave([generation.deltas() for generation in self._generations]):
            pass
        return self._format.document()

    def records(self) -> Iterator[list[Record]]:
        yield from interleave(
            [self._records_of(prompt) for prompt in range(len(self._generations))]
        )
        yield self._format.last()

    def abort(self) -> None:
        for generation in self._generations:
            generation.abort()

    def _records_of(self, prompt: int) -> Iterator[list[Record]]:
        """Yield the records of the answers to one prompt."""
        generation, begun = self._generations[prompt], set[int]()
        first = prompt * len(generation.answers)
        for delta in generation.deltas():
            if first:
                delta = replace(delta, index=first + delta.index)
            records = [] if delta.index in begun else self._format.begin(delta.index)
            begun.add(delta.index)
            records += self._format.delta(delta)
            if delta.finish is not None:
                records += self._format.end(delta.index)
            yield records
