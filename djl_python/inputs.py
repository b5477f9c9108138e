"""What a handler is called with."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from djl_python.pair_list import PairList


class Input:
    """A request, or a dynamic batch of several; empty when the handler is to get ready.

    A batch has the contents of all its requests one after the other: take them from
    `get_batches`, which gives a single request as a batch of one.
    """

    def __init__(self, batches: Sequence[Input] = ()) -> None:
        self.function_name = "handle"
        self.properties: dict[str, Any] = {}
        """Headers of the request, and options of the model."""
        self.content = PairList()
        self._batches = list(batches)
        for each in batches:
            self.content.add(None, each.get_as_bytes())
        if batches:
            self.properties["batch_size"] = len(batches)

    def is_batch(self) -> bool:
        return bool(self._batches)

    def get_batch_size(self) -> int:
        return len(self._batches) or 1

    def get_batches(self) -> list[Input]:
        return self._batches or [self]

    def get_function_name(self) -> str:
        return self.function_name

    def get_properties(self) -> dict[str, Any]:
        return self.properties

    def get_property(self, key: str) -> Any:
        """None where there is none. Case does not count."""
        named = (value for name, value in self.properties.items() if name.lower() == key.lower())
        return next(named, None)

    def get_content(self) -> PairList:
        return self.content

    def contains_key(self, key: str) -> bool:
        return self.content.get(key) is not None

    def is_empty(self) -> bool:
        """Whether this is no request: the handler is called once to get ready."""
        return self.content.is_empty()

    def get_as_bytes(self, key: str | None = None) -> bytes:
        """The content of that name; without one the body. Raises KeyError where there is none."""
        if key is None and not self.content.is_empty():
            return self.content.value_at(0)
        found = None if key is None else self.content.get(key)
        if found is None:
            raise KeyError(f"no content {key!r}" if key else "the input is empty (is_empty)")
        return found

    def get_as_string(self, key: str | None = None) -> str:
        return self.get_as_bytes(key).decode("utf-8")

    def get_as_json(self, key: str | None = None) -> Any:
        return json.loads(self.get_as_bytes(key))

    def get_as_csv(self, key: str | None = None) -> list[dict[str, str]]:
        """The rows, by the names in the first line."""
        return list(csv.DictReader(io.StringIO(self.get_as_string(key))))

    def get_as_image(self, key: str | None = None) -> Any:
        """An image of Pillow."""
        from PIL import Image

        return Image.open(io.BytesIO(self.get_as_bytes(key)))

    def get_as_npz(self, key: str | None = None) -> list[Any]:
        """The arrays of a file that numpy wrote."""
        import numpy

        arrays = numpy.load(io.BytesIO(self.get_as_bytes(key)))
        return [arrays[name] for name in arrays.files]

    def get_data(self, key: str | None = None) -> Any:
        """The content in the form that its Content-Type names."""
        content_type = str(self.get_property("content-type") or "")
        if self.is_empty():
            return None
        if content_type.startswith("application/json"):
            return self.get_as_json(key)
        if content_type.startswith("text/"):
            return self.get_as_string(key)
        if content_type.startswith("image/"):
            return self.get_as_image(key)
        return self.get_as_npz(key) if content_type == "tensor/npz" else self.get_as_bytes(key)
