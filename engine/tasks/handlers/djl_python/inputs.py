"""The input of a handler."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from engine.tasks.handlers.djl_python.pair_list import PairList


class Input:
    """A request, or a dynamic batch of several; it is empty in the call that initializes a handler.

    A batch holds the contents of all its requests one after the other. Handlers iterate over
    `get_batches`, which returns a single request as a batch of one.
    """

    def __init__(self, batches: Sequence[Input] = ()) -> None:
        self.function_name = "handle"
        self.properties: dict[str, Any] = {}
        """Request headers and model options."""
        self.content = PairList()
        self._batches = list(batches)
        for request in batches:
            self.content.add(None, request.get_as_bytes())
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
        """Return a property, or None if it is not set. The key is case-insensitive."""
        matches = (value for name, value in self.properties.items() if name.lower() == key.lower())
        return next(matches, None)

    def get_content(self) -> PairList:
        return self.content

    def contains_key(self, key: str) -> bool:
        return self.content.get(key) is not None

    def is_empty(self) -> bool:
        """Return whether this is the call that initializes the handler, not a request."""
        return self.content.is_empty()

    def get_as_bytes(self, key: str | None = None) -> bytes:
        """Return the content named `key`, by default the body. Raises KeyError if there is none."""
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
        """Return the rows as dicts keyed by the header line."""
        return list(csv.DictReader(io.StringIO(self.get_as_string(key))))

    def get_as_image(self, key: str | None = None) -> Any:
        """Return a Pillow image."""
        from PIL import Image

        return Image.open(io.BytesIO(self.get_as_bytes(key)))

    def get_as_npz(self, key: str | None = None) -> list[Any]:
        """Return the arrays of a .npz file."""
        import numpy

        arrays = numpy.load(io.BytesIO(self.get_as_bytes(key)))
        return [arrays[name] for name in arrays.files]

    def get_data(self, key: str | None = None) -> Any:
        """Return the content decoded by its Content-Type; None if there is no content."""
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
