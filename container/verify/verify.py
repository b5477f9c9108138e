"""`longshore verify`: computes logged answers again under `none`, and compares them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import gevent
import msgspec
from tqdm import tqdm

from container.batch.batch import COMMAND, post, started
from container.configuration.properties import Setting
from container.multi_model.model_container import ModelContainer
from container.verify.difference import digest_difference, first_difference
from core.errors import ConfigurationError

ALONE = Setting("option.batching", "none", "longshore verify")
EQUAL, DIFFERENT, UNKNOWN = range(3)
"""Exit codes. Unknown: an answer cannot be computed here."""


class Logged(msgspec.Struct, frozen=True):
    """A logged answer: a line of the file, or all of it."""

    url: str
    """The path of the request, such as /v1/completions."""
    request: dict[str, Any]
    response: dict[str, Any] | list[Any]
    """The body of the response."""
    digest: str | None = None
    """The response's header X-Longshore-Digest; needed if the body has no system_fingerprint."""

    @property
    def known_digest(self) -> str | None:
        if self.digest is None and isinstance(self.response, dict):
            return self.response.get("system_fingerprint")
        return self.digest

    @property
    def has_seed(self) -> bool:
        return "seed" in {**self.request, **self.request.get("parameters", {})}

    def __post_init__(self) -> None:
        if self.request.get("stream"):
            raise ValueError("the answer was streamed; log requests without `stream`")


def verify(
    path: Path,
    model_dir: Path | None,
    properties: Path | None,
    flags: Sequence[Setting],
    command: Sequence[str] = COMMAND,
) -> int:
    """Print an outcome for each answer of the file, and return the exit code.

    On a terminal, a progress bar is shown. Raises ConfigurationError if the file is unusable or the
    container does not start.
    """
    answers = _read(path)
    flags = [ALONE, *(flag for flag in flags if flag.key != ALONE.key)]
    outcomes = [EQUAL]
    with (
        started(command, model_dir, properties, 1, flags) as container,
        tqdm(total=len(answers), unit="answer", disable=None) as bar,
    ):
        gevent.spawn(_tick, bar)
        for number, logged in enumerate(answers, 1):
            try:
                outcome, text = _compare(logged, container)
            except (OSError, HTTPException):
                raise ConfigurationError(f"the server ended: {container.exit_reason()}") from None
            outcomes.append(outcome)
            bar.update()
            bar.write(f"{path}{f':{number}' if len(answers) > 1 else ''}: {text}", sys.stdout)
    return max(outcomes)


def _tick(bar: Any) -> None:
    """Show the time that answers take, until the last one has come."""
    while bar.n < bar.total:
        bar.refresh()
        gevent.sleep(1)


def _read(path: Path) -> list[Logged]:
    """Read a file of one answer, or of one on each line. Raises ConfigurationError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    try:
        msgspec.json.decode(data)
        texts = [data]
    except msgspec.DecodeError:
        texts = [line for line in data.splitlines() if line.strip()]
    if not texts:
        raise ConfigurationError(f"{path}: there is no answer in it")
    try:
        return [msgspec.json.decode(text, type=Logged) for text in texts]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not a logged answer: {error}") from None


def _compare(logged: Logged, container: ModelContainer) -> tuple[int, str]:
    """Return the exit code for an answer, and the outcome in words."""
    status, digest, computed = _computed(logged, container)
    if status >= 300:
        return UNKNOWN, f"cannot be computed: status {status}, {computed}"
    known = logged.known_digest
    if known is not None and known != digest:
        return UNKNOWN, f"was computed otherwise: {digest_difference(known, digest)}"
    difference = first_difference(logged.response, computed)
    if difference is None:
        return EQUAL, f"equal{'' if known else ', but it has no digest of what computed it'}"
    if not logged.has_seed:
        difference += " (the request has no seed; without one, only temperature 0 repeats itself)"
    return DIFFERENT, f"differs at {difference}"


def _computed(logged: Logged, container: ModelContainer) -> tuple[int, str, Any]:
    """Return the status, the digest and the body of the container's response."""
    response, body = post(container, logged.url, logged.request, {})
    digest = response.headers.get("X-Longshore-Digest", "")
    try:
        return response.status, digest, msgspec.json.decode(body)
    except msgspec.DecodeError:
        return response.status, digest, body.decode(errors="replace")
