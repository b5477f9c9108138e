"""The bytes of a request's body as an object of fields."""

from __future__ import annotations

import csv
import io
from typing import cast

import msgspec

from core.errors import RequestError

_JSON_TYPES = ("", "application/json", "application/x-www-form-urlencoded")
"""Without a type a body is JSON; the third is what `curl -d` says of whatever it sends."""


def is_json_type(content_type: str) -> bool:
    """Whether a body of this Content-Type is read as JSON."""
    return content_type in _JSON_TYPES or content_type.endswith("+json")


def is_served_type(content_type: str) -> bool:
    """Whether a body of this Content-Type can be read."""
    return is_json_type(content_type) or content_type in ("text/plain", "text/csv")


def read_body(
    body: bytes, content_type: str, example: str = '{"inputs": "..."}'
) -> dict[str, object]:
    """The fields of a body of a served type. Raises RequestError where it is not of that type."""
    text = _decoded(body)
    if content_type == "text/plain":
        return {"inputs": text}
    if content_type == "text/csv":
        return {"inputs": _csv_inputs(text)}
    return _json_object(body, example)


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("body", f"byte {error.start} is not UTF-8") from None


def _csv_inputs(text: str) -> list[str]:
    """The rows under the header `inputs`."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise RequestError("body", f"is not CSV: {error}") from None
    rows = [row for row in rows if row]  # empty lines
    if not rows or rows[0] != ["inputs"]:
        raise RequestError("body", "expected CSV of one column whose header is inputs")
    if any(len(row) != 1 for row in rows):
        raise RequestError("body", 'has more than one column; "quote" texts with commas')
    return [row[0] for row in rows[1:]]


def _json_object(body: bytes, example: str) -> dict[str, object]:
    if not body.strip():
        raise RequestError("body", f"is empty; send {example}")
    try:
        value: object = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("body", "is nested too deeply") from None
    except ValueError as error:
        raise RequestError("body", f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("body", f"expected a JSON object such as {example}")
    return cast(dict[str, object], value)
