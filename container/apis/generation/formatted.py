"""An answer of any API, changed by the user's own output_formatter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from container.apis.generation.answer import Answer, Record
from container.apis.generation.formatters import Formatters
from container.http.failures import Failure


class FormattedAnswer:
    """What goes wrong is told as ever."""

    def __init__(self, answer: Answer, formatters: Formatters) -> None:
        self._answer = answer
        self._formatters = formatters
        self.ends_with_done = answer.ends_with_done

    def whole(self) -> object:
        return self._formatters.answer(self._answer.whole())

    def pieces(self) -> Iterator[list[Record | str]]:
        """Texts are sent as they are."""
        for records in self._answer.pieces():
            yield [cast(Record | str, self._formatters.answer(record)) for record in records]

    def failure(self, failure: Failure) -> Record:
        return self._answer.failure(failure)

    def abort(self) -> None:
        self._answer.abort()
