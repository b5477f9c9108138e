"""SageMaker's request to load a model, and the query of a list of models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from container.schema.fields import Field, Fields, read_fields
from container.schema.kinds import TEXT, shaped
from core.errors import RequestError

_NAME = "[A-Za-z0-9][!-.0-~]{0,255}"
"""Printable characters but the slash: a part of a path."""
MAX_PAGE = 100
"""DJL Serving's."""

LOAD_FIELDS: Fields = {
    "model_name": Field(
        shaped(TEXT, {"pattern": f"^{_NAME}$"}), "What the other routes are to call the model."
    ),
    "url": Field(TEXT, "The model's directory or archive, an absolute path of the container."),
}


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A checked request."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which part of a list."""

    limit: int
    after: str
    """The token of the page before; '' for the first."""


def read_load_request(body: Mapping[str, object]) -> LoadRequest:
    """Raises RequestError that names the first mistake.

    What else SageMaker may send some day is passed over.
    """
    values = read_fields({name: body.get(name) for name in LOAD_FIELDS}, LOAD_FIELDS)
    for name in LOAD_FIELDS:
        if not values.get(name, ""):
            raise RequestError(name, 'is missing; send {"model_name": "...", "url": "..."}')
    request = LoadRequest(values.get("model_name", ""), values.get("url", ""))
    if not re.fullmatch(_NAME, request.name):
        raise RequestError(
            "model_name",
            "expected a letter or digit, then at most 255 printable characters other than /",
        )
    return request


def read_page_request(query: Mapping[str, str]) -> PageRequest:
    """DJL Serving's names. Raises RequestError for a limit that is none."""
    text = query.get("limit", str(MAX_PAGE))
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise RequestError("limit", "expected a number from 1")
    return PageRequest(int(text), query.get("next_page_token", ""))
