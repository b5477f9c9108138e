"""The interface of a text generation response: one document, or a stream of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

from container.apis.generation.formatters import Formatters
from container.http.failures import Failure

Record = dict[str, object]
"""A JSON object: one line, or one server-sent event, of a stream."""


class ApiResponse(Protocol):
    """The response to one request, from one or several generations."""

    stream: bool
    """Whether the client asked for a stream."""
    ends_with_done: bool
    """Whether a stream of server-sent events ends with OpenAI's `data: [DONE]`."""

    def full(self) -> object:
        """Run the generation and return the document. Raises what `Generation.deltas` raises."""
        ...

    def chunks(self) -> Iterator[Sequence[Record | str]]:
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


class FormattedResponse:
    """A response whose document or records, except failures, go through the output_formatter."""

    def __init__(self, response: ApiResponse, formatters: Formatters) -> None:
        self._response = response
        self._formatters = formatters
        self.stream = response.stream
        self.ends_with_done = response.ends_with_done

    def full(self) -> object:
        return self._formatters.format_output(self._response.full())

    def chunks(self) -> Iterator[list[Record | str]]:
        for records in self._response.chunks():
            yield [cast(Record | str, self._formatters.format_output(record)) for record in records]

    def failure(self, failure: Failure) -> Record:
        return self._response.failure(failure)

    def abort(self) -> None:
        self._response.abort()
