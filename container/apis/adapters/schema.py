"""LMI's requests about LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from container.schema.fields import Field, Fields, read_fields
from container.schema.kinds import BOOLEAN, TEXT, shaped
from core.errors import RequestError

MAX_NAME = 256

_NAME = shaped(TEXT, {"minLength": 1, "maxLength": MAX_NAME})
_SRC = shaped(TEXT, {"minLength": 1})

ADAPTER_FIELDS: Fields = {
    "name": Field(_NAME, "What requests choose it by."),
    "src": Field(_SRC, "Its directory, in PEFT's form."),
    "preload": Field(BOOLEAN, "Passed over: every adapter is loaded at once."),
    "pin": Field(BOOLEAN, "Passed over: every adapter stays until it is unloaded."),
}


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """An adapter to load."""

    name: str
    src: str


def read_adapter_request(body: Mapping[str, object]) -> AdapterRequest:
    """Raises RequestError that names the first mistake."""
    values = read_fields(body, ADAPTER_FIELDS)
    name, src = values.get("name", ""), values.get("src", "")
    if not 0 < len(name) <= MAX_NAME:
        raise RequestError("name", f"expected a text of 1 to {MAX_NAME} characters")
    if not src:
        raise RequestError("src", "expected the adapter's directory")
    return AdapterRequest(name, src)
