"""Parses a request body into a dict of fields."""

from __future__ import annotations

import csv
import io
from itertools import islice
from typing import cast

from container.schema.json_body import decode_json
from core.configuration.limits import INPUTS
from core.errors import RequestError

_JSON_TYPES = ("", "application/json", "application/x-www-form-urlencoded")
"""A body without a Content-Type is read as JSON; `curl -d` sends the third type by default."""


def is_json_type(content_type: str) -> bool:
    """Return whether a body of this Content-Type is parsed as JSON."""
    return content_type in _JSON_TYPES or content_type.endswith("+json")


def read_json(body: bytes, example: str = '{"inputs": "..."}') -> dict[str, object]:
    """Return the fields of a JSON object.

    Raises RequestError when the body is malformed; `example` is quoted in the message.
    """
    try:
        value = decode_json(body, "body")
    except ValueError as error:
        raise _no_json(body, example, error) from None
    if not isinstance(value, dict):
        raise RequestError("body", f"expected a JSON object such as {example}")
    return cast(dict[str, object], value)


def _no_json(body: bytes, example: str, error: ValueError) -> RequestError:
    """Return the error for a body that is malformed. Raises RequestError if it is not UTF-8."""
    if not body.strip():
        return RequestError("body", f"is empty; send {example}")
    _decoded(body)
    return RequestError("body", f"is not JSON: {error}")


def read_text(body: bytes) -> dict[str, object]:
    """Return the only field of a text. Raises RequestError if the body is not UTF-8."""
    return {"inputs": _decoded(body)}


def read_csv(body: bytes) -> dict[str, object]:
    """Return the only field of a CSV. Raises RequestError when the body is malformed."""
    return {"inputs": _csv_inputs(_decoded(body))}


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("body", f"byte {error.start} is not UTF-8") from None


def _csv_inputs(text: str) -> list[str]:
    try:
        # Empty lines are dropped. One row more than allowed is enough to refuse the body.
        found = (row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row)
        rows = list(islice(found, INPUTS.maximum + 2))
    except csv.Error as error:
        raise RequestError("body", f"is not CSV: {error}") from None
    if not rows or rows[0] != ["inputs"]:
        raise RequestError("body", "expected CSV with one column named inputs")
    if any(len(row) != 1 for row in rows):
        raise RequestError(
            "body", 'has more than one column; put "quotes" around strings with commas'
        )
    return [row[0] for row in rows[1:]]
