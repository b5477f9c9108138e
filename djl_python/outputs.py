"""What a handler answers with."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterable, Iterable
from typing import Any

from djl_python.pair_list import PairList

_JSON = "application/json"


class Output:
    """An answer, or those of a batch: one content for each of its requests, in their order, or by
    `batch_index`."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        """HTTP status."""
        self.message = message
        self.properties: dict[str, str] = {}
        """Headers of the answer; `Content-Type` is that of the content unless it is set."""
        self.content = PairList()
        self.batch_indices: list[int | None] = []
        """Of each content."""
        self.content_types: list[str] = []
        """Of each content, as its form suggests."""
        self.stream_content: Iterable[Any] | AsyncIterable[Any] | None = None

    def set_code(self, code: int) -> Output:
        self.code = code
        return self

    def set_message(self, message: str) -> Output:
        self.message = message
        return self

    def error(self, error: str, code: int = 424, message: str = "prediction failure") -> Output:
        """Makes it the answer to a request that failed."""
        self.code, self.message = code, message
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add_property(self, key: str, val: str) -> Output:
        self.properties[key] = val
        return self

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> Output:
        """Text or bytes as they are, anything else as JSON."""
        match value:
            case str():
                return self._add(value.encode(), "text/plain; charset=utf-8", key, batch_index)
            case bytes() | bytearray() | memoryview():
                return self._add(bytes(value), "application/octet-stream", key, batch_index)
            case _:
                return self.add_as_json(value, key, batch_index)

    def add_as_json(
        self, val: Any, key: str | None = None, batch_index: int | None = None
    ) -> Output:
        """Numbers and arrays of numpy and torch may be in it. Raises ValueError for NaN."""
        data = json.dumps(val, ensure_ascii=False, allow_nan=False, default=_plain)
        return self._add(data.encode(), _JSON, key, batch_index)

    def add_as_npz(
        self, np_list: list[Any], key: str | None = None, batch_index: int | None = None
    ) -> Output:
        """Arrays in numpy's own file format."""
        import numpy

        file = io.BytesIO()
        numpy.savez(file, *np_list)
        return self._add(file.getvalue(), "tensor/npz", key, batch_index)

    def add_stream_content(self, stream_content: Iterable[Any] | AsyncIterable[Any]) -> Output:
        """The parts of an answer that is sent as they come: text and bytes as they are, anything
        else as a line of JSON."""
        if not isinstance(stream_content, Iterable | AsyncIterable):
            raise TypeError(f"{type(stream_content).__name__} has no parts to be streamed")
        self.stream_content = stream_content
        return self

    def _add(self, data: bytes, kind: str, key: str | None, batch_index: int | None) -> Output:
        self.content.add(key, data)
        self.content_types.append(kind)
        self.batch_indices.append(batch_index)
        return self


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy's and torch's
        return value.tolist()
    if hasattr(value, "isoformat"):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
