"""A batch of inputs in one request, each with its own answer or error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from container.apis.generation.interleaving import interleave
from container.apis.generation.response import Record
from container.apis.text.response import TextResponse
from container.http.deadline import ClientGoneError
from container.http.failures import Failure, describe
from core.errors import LongshoreError

Item = TextResponse | LongshoreError
"""One input's response, or the error that kept its generation from starting."""


class BatchResponse:
    """The responses to a batch, in the order of its inputs."""

    ends_with_done = False

    def __init__(self, items: Sequence[Item], request_id: str, *, stream: bool) -> None:
        """More items may be added before `full` or `chunks` is called."""
        self.stream = stream
        self._items = items
        self._request_id = request_id

    def full(self) -> object:
        """Return a list of documents and errors. Raises the first error if every input failed."""
        finished = dict(interleave([self._finish(index) for index in range(len(self._items))]))
        results = [finished[index] for index in range(len(self._items))]
        if isinstance(results[0], LongshoreError) and not any(
            isinstance(result, dict) for result in results
        ):
            raise results[0]
        return [
            result if isinstance(result, dict) else self._error_record(result) for result in results
        ]

    def chunks(self) -> Iterator[list[Record]]:
        """Yield the records of all inputs as they arrive, each with the `index` of its input."""
        yield from interleave([self._chunks_of(index) for index in range(len(self._items))])

    def failure(self, failure: Failure) -> Record:
        return failure.as_lmi()

    def abort(self) -> None:
        for item in self._items:
            if isinstance(item, TextResponse):
                item.abort()

    def _finish(self, index: int) -> Iterator[tuple[int, Record | LongshoreError]]:
        """Run one input's generation and yield its index with its document or error."""
        item = self._items[index]
        try:
            yield index, item.document() if isinstance(item, TextResponse) else item
        except ClientGoneError:
            raise
        except LongshoreError as error:
            yield index, error

    def _chunks_of(self, index: int) -> Iterator[list[Record]]:
        item = self._items[index]
        if isinstance(item, LongshoreError):
            yield [{"index": index, **self._error_record(item)}]
            return
        try:
            for records in item.chunks():
                yield [{**record, "index": index} for record in records]
        except ClientGoneError:
            raise
        except LongshoreError as error:
            yield [{**item.failure(describe(error, self._request_id)), "index": index}]

    def _error_record(self, error: LongshoreError) -> Record:
        return describe(error, self._request_id).as_lmi()
