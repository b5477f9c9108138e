"""What every API's answer is to the rest: a document, or a stream of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from container.http.failures import Failure

Record = dict[str, object]
"""What becomes one line, or one event, of a stream."""


class Answer(Protocol):
    """The answer to one request, over one generation or several."""

    ends_with_done: bool
    """Whether server-sent events end with OpenAI's `data: [DONE]`."""

    def whole(self) -> object:
        """The document, once all is generated. Raises what `Generation.batches` raises."""
        ...

    def pieces(self) -> Iterator[Sequence[Record | str]]:
        """The records, as tokens come; one that is text is sent as it is.

        Raises what `Generation.batches` raises.
        """
        ...

    def failure(self, failure: Failure) -> Record:
        """The last record of a stream that failed."""
        ...

    def abort(self) -> None:
        """Has the engine stop; harmless after the end."""
        ...
