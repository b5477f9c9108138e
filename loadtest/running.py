"""A running server as `--subject` names it."""

from __future__ import annotations

import re
from typing import NamedTuple

_TEXT = re.compile(
    r"(?P<name>[^=,]+)=(?:(?P<schema>lmi|openai)\+)?"
    r"(?:sagemaker:(?P<sagemaker>[\w-]+)|(?P<url>https?://\S+))"
)


class Running(NamedTuple):
    """A server that is already running, here or elsewhere."""

    name: str
    schema: str | None
    """None for that of `--schema`."""
    url: str | None
    sagemaker: str | None
    """Name of the SageMaker endpoint, if it is one."""


def parse_running(text: str) -> Running:
    """Parse `NAME=URL`, `NAME=openai+URL` or `NAME=sagemaker:ENDPOINT`. Raises ValueError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"invalid subject '{text}': expected NAME=URL, NAME=openai+URL, NAME=lmi+URL or "
            "NAME=sagemaker:ENDPOINT, without a comma in NAME, such as vllm=openai+http://host:8000"
        )
    return Running(match["name"].strip(), match["schema"], match["url"], match["sagemaker"])
