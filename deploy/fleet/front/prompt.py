"""The parts of an HTTP request that decide its routing: its session and its prompt's prefixes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from container.schema.body import is_json_type, read_csv, read_json, read_text
from core.errors import LongshoreError
from core.routing import RoutedRequest, prefix_keys
from deploy.fleet.http_message import HttpRequest

_SESSION = b"x-amzn-sagemaker-session-id"
_NEW_SESSION = "NEW_SESSION"
_ADAPTER = b"x-amzn-sagemaker-adapter-identifier"
_BEFORE_PROMPT = ("tools", "system", "instructions")
"""Fields that chat templates put before the conversation."""
_PROMPT = ("inputs", "prompt", "messages", "input")
"""The fields of all APIs that hold the prompt."""


def routed_request(request: HttpRequest) -> RoutedRequest:
    """Return the session and prefixes of a request. An invalid body has no prefixes.

    The container does all other checks.
    """
    session = request.header(_SESSION)
    content_type = re.split("[;,]", request.header(b"content-type") or "")[0].strip().lower()
    body = _fields(request.body, content_type) if request.body else {}
    scope = [request.header(_ADAPTER), body.get("adapters"), body.get("model")]
    return RoutedRequest(
        None if session == _NEW_SESSION else session,
        prefix_keys(_prompt(body), _text(scope)),
    )


def _fields(body: bytes, content_type: str) -> Mapping[str, object]:
    try:
        if is_json_type(content_type):
            return read_json(body)
        reader = {"text/plain": read_text, "text/csv": read_csv}.get(content_type)
        return reader(body) if reader is not None else {}
    except LongshoreError:
        return {}


def _prompt(body: Mapping[str, object]) -> str | Sequence[int]:
    """Return the prompt as text or token ids. If prompts begin alike, so do the results."""
    before = [body[name] for name in _BEFORE_PROMPT if name in body]
    prompt = next((body[name] for name in _PROMPT if name in body), "")
    if not before and isinstance(prompt, str):
        return prompt
    if not before and _is_token_ids(prompt):
        return cast(list[int], prompt)
    return _text([*before, prompt])


def _is_token_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
