"""A batch of texts in one request: each has an answer or a failure of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from container.apis.generation.answer import Record
from container.apis.generation.interleaving import interleave
from container.apis.text.answer import TextAnswer
from container.http.failures import Failure, describe
from container.http.patience import ClientGoneError
from core.errors import LongshoreError

Item = TextAnswer | LongshoreError


class BatchAnswer:
    """Answers in the order of the inputs; an error stands for an input that could not start."""

    ends_with_done = False

    def __init__(self, items: Sequence[Item], request_id: str) -> None:
        self._items = items
        self._request_id = request_id

    def whole(self) -> object:
        """A list. Where no input has an answer, raises the error of the first."""
        done = dict(interleave([self._settled(at) for at in range(len(self._items))]))
        results = [done[at] for at in range(len(self._items))]
        if isinstance(results[0], LongshoreError) and not any(
            isinstance(each, dict) for each in results
        ):
            raise results[0]
        return [each if isinstance(each, dict) else self._described(each) for each in results]

    def pieces(self) -> Iterator[list[Record]]:
        """The records of all inputs as they come, each with the `index` of its input."""
        yield from interleave([self._pieces(at) for at in range(len(self._items))])

    def failure(self, failure: Failure) -> Record:
        return failure.as_lmi()

    def abort(self) -> None:
        for item in self._items:
            if isinstance(item, TextAnswer):
                item.abort()

    def _settled(self, at: int) -> Iterator[tuple[int, Record | LongshoreError]]:
        item = self._items[at]
        try:
            yield at, item.document() if isinstance(item, TextAnswer) else item
        except ClientGoneError:
            raise
        except LongshoreError as error:
            yield at, error

    def _pieces(self, at: int) -> Iterator[list[Record]]:
        item = self._items[at]
        if isinstance(item, LongshoreError):
            yield [{"index": at, **self._described(item)}]
            return
        try:
            for records in item.pieces():
                yield [{**record, "index": at} for record in records]
        except ClientGoneError:
            raise
        except LongshoreError as error:
            yield [{**item.failure(describe(error, self._request_id)), "index": at}]

    def _described(self, error: LongshoreError) -> Record:
        return describe(error, self._request_id).as_lmi()
