"""The output of a handler."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterable, Iterable
from typing import Any

from engine.tasks.handlers.djl_python.pair_list import PairList

_JSON = "application/json"


class Output:
    """An answer, or the answers of a batch.

    A batch needs one content per request, in order or with a `batch_index` each.
    """

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        """HTTP status code."""
        self.message = message
        self.properties: dict[str, str] = {}
        """Response headers; `Content-Type` defaults to that of the content."""
        self.content = PairList()
        self.batch_indices: list[int | None] = []
        """Batch index of each content."""
        self.content_types: list[str] = []
        """Default content type of each content."""
        self.stream_content: Iterable[Any] | AsyncIterable[Any] | None = None

    def set_code(self, code: int) -> Output:
        self.code = code
        return self

    def set_message(self, message: str) -> Output:
        self.message = message
        return self

    def error(self, error: str, code: int = 424, message: str = "prediction failure") -> Output:
        """Make this the answer to a failed request."""
        self.code, self.message = code, message
        return self.add_as_json({"code": code, "message": message, "error": error})

    def add_property(self, key: str, val: str) -> Output:
        self.properties[key] = val
        return self

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> Output:
        """Add text or bytes unchanged, anything else as JSON."""
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
        """Add a value as JSON; it may contain numpy and torch values. Raises ValueError for NaN."""
        data = json.dumps(val, ensure_ascii=False, allow_nan=False, default=_plain)
        return self._add(data.encode(), _JSON, key, batch_index)

    def add_as_npz(
        self, np_list: list[Any], key: str | None = None, batch_index: int | None = None
    ) -> Output:
        """Add arrays as a .npz file."""
        import numpy

        file = io.BytesIO()
        numpy.savez(file, *np_list)
        return self._add(file.getvalue(), "tensor/npz", key, batch_index)

    def add_stream_content(self, stream_content: Iterable[Any] | AsyncIterable[Any]) -> Output:
        """Stream an answer in parts: text and bytes unchanged, anything else as a line of JSON.

        Raises TypeError if `stream_content` is not iterable.
        """
        if not isinstance(stream_content, Iterable | AsyncIterable):
            raise TypeError(
                f"{type(stream_content).__name__} is not iterable and cannot be streamed"
            )
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
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
