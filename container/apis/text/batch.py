"""A batch of inputs in one request, each with its own answer or error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from container.apis.generation.interleaving import interleave
from container.apis.generation.reply import Record, Reply, decoded
from container.http.deadline import ClientGoneError
from container.http.failures import Failure, describe
from core.errors import LongshoreError

Item = Reply | LongshoreError
"""One input's reply, or the error that kept its generation from starting."""


class BatchReply:
    """The replies to a batch, in the order of its inputs."""

    ends_with_done = False

    def __init__(self, items: Sequence[Item], request_id: str, *, stream: bool) -> None:
        self.stream = stream
        self._items = items
        self._request_id = request_id

    def document(self) -> object:
        """Return a list of documents and errors. Raises the first error if every input failed."""
        finished = dict(interleave([self._finish(index) for index in range(len(self._items))]))
        results = [finished[index] for index in range(len(self._items))]
        if isinstance(results[0], LongshoreError) and all(
            isinstance(result, LongshoreError) for result in results
        ):
            raise results[0]
        return [
            self._error_record(result) if isinstance(result, LongshoreError) else result
            for result in results
        ]

    def records(self) -> Iterator[list[Record]]:
        """Yield the records of all inputs as they arrive, each with the `index` of its input."""
        yield from interleave([self._records_of(index) for index in range(len(self._items))])

    def failure(self, failure: Failure) -> Record:
        return failure.as_lmi()

    def abort(self) -> None:
        for item in self._items:
            if isinstance(item, Reply):
                item.abort()

    def _finish(self, index: int) -> Iterator[tuple[int, object]]:
        """Run one input's generation and yield its index with its document or error."""
        item = self._items[index]
        try:
            yield index, item.document() if isinstance(item, Reply) else item
        except ClientGoneError:
            raise
        except LongshoreError as error:
            yield index, error

    def _records_of(self, index: int) -> Iterator[list[Record]]:
        item = self._items[index]
        if isinstance(item, LongshoreError):
            yield [{"index": index, **self._error_record(item)}]
            return
        try:
            for records in item.records():
                yield [{**decoded(record), "index": index} for record in records]
        except ClientGoneError:
            raise
        except LongshoreError as error:
            yield [{**item.failure(describe(error, self._request_id)), "index": index}]

    def _error_record(self, error: LongshoreError) -> Record:
        return describe(error, self._request_id).as_lmi()
