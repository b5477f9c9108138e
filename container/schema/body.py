"""Parses a request body into a dict of fields."""

from __future__ import annotations

import csv
import io
from typing import cast

import msgspec

from core.errors import RequestError

_JSON_TYPES = ("", "application/json", "application/x-www-form-urlencoded")
"""A body without a Content-Type is read as JSON; `curl -d` sends the third type by default."""


def is_json_type(content_type: str) -> bool:
    """Return whether a body of this Content-Type is parsed as JSON."""
    return content_type in _JSON_TYPES or content_type.endswith("+json")


def is_supported_type(content_type: str) -> bool:
    """Return whether a body of this Content-Type can be parsed."""
    return is_json_type(content_type) or content_type in ("text/plain", "text/csv")


def read_body(
    body: bytes, content_type: str, example: str = '{"inputs": "..."}'
) -> dict[str, object]:
    """Return the fields of a body whose Content-Type passes `is_supported_type`.

    Raises RequestError when the body is malformed; `example` is quoted in the message.
    """
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
    """Return the rows below the header `inputs`."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise RequestError("body", f"is not CSV: {error}") from None
    rows = [row for row in rows if row]  # drops empty lines
    if not rows or rows[0] != ["inputs"]:
        raise RequestError("body", "expected CSV with one column named inputs")
    if any(len(row) != 1 for row in rows):
        raise RequestError(
            "body", 'has more than one column; put "quotes" around strings with commas'
        )
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
