"""One input or several, as strings or as token ids: the form that OpenAI gave to `prompt`."""

from __future__ import annotations

from typing import cast

from container.schema.kinds import Kind, Schema, is_integers, is_list
from core.configuration.limits import Limit
from core.errors import RequestError


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _is_prompts(value: list[object]) -> bool:
    return (
        all(isinstance(prompt, str) for prompt in value)
        or is_integers(value)
        or all(map(is_integers, value))
    )


_STRING: Schema = {"type": "string"}
_TOKENS = _list_of({"type": "integer", "minimum": 0})
PROMPT = Kind(
    "a string, a list of strings, a list of token ids or a list of lists of token ids",
    lambda value: isinstance(value, str) or (is_list(value) and _is_prompts(value)),
    {"anyOf": [_STRING, _list_of(_STRING), _TOKENS, _list_of(_TOKENS)]},
)


def read_prompts(field: str, value: object, limit: Limit) -> list[str | list[int]]:
    """Return the prompts in a value that `PROMPT` accepts.

    Raises RequestError if there is none, one is empty, or there are more than `limit`.
    """
    if isinstance(value, str) or is_integers(value):
        prompts: list[str | list[int]] = [value]
    else:
        prompts = cast(list[str | list[int]], value)
    if not prompts or not all(prompts):
        raise RequestError(field, "expected a non-empty string or non-empty token ids")
    limit.check(field, len(prompts))
    return prompts
