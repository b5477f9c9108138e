"""A running server as `--subject` names it."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

_TEXT = re.compile(
    r"(?P<name>[^=,]+)=(?:(?P<schema>lmi|openai)\+)?"
    r"(?:sagemaker:(?P<sagemaker>[\w-]+)|(?P<url>https?://\S+))"
)


class Running(NamedTuple):
    """A server that is already running, here or elsewhere."""

    name: str
    schema: str | None
    """None: the schema of `--schema`."""
    url: str | None
    sagemaker: str | None
    """Name of the SageMaker endpoint, if it is one."""


def parse_running(text: str) -> Running:
    """Parse `NAME=URL`, `NAME=openai+URL` or `NAME=sagemaker:ENDPOINT`. Raises ValueError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or not _is_port_valid(match["url"] or ""):
        raise ValueError(
            f"invalid subject '{text}': expected NAME=URL, NAME=openai+URL, NAME=lmi+URL or "
            "NAME=sagemaker:ENDPOINT, without a comma in NAME, such as vllm=openai+http://host:8000"
        )
    return Running(match["name"].strip(), match["schema"], match["url"], match["sagemaker"])


def _is_port_valid(url: str) -> bool:
    """Whether the URL has no port or one that is a valid number."""
    try:
        urlsplit(url).port  # noqa: B018 - raises ValueError
    except ValueError:
        return False
    return True
