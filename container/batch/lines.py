"""The lines of batch files: requests in, outcomes out, in OpenAI's format.

https://developers.openai.com/api/docs/guides/batch
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from core.errors import ConfigurationError


class Line(msgspec.Struct, frozen=True):
    """A request."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


class _WithId(msgspec.Struct):
    custom_id: str | None = None


class BatchResponse(msgspec.Struct, frozen=True):
    """The server's answer to a request, whatever its status."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True):
    """Why a line got no answer."""

    code: Literal["invalid_line", "no_answer"]
    message: str


class Outcome(msgspec.Struct, frozen=True):
    """A line of the output file."""

    id: str
    """`line-N`, where N is the number of the input line, from 1. A resumed batch skips the input
    lines that have an outcome."""
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None


def outcome_id(number: int) -> str:
    """Return the id of the outcome of an input line."""
    return f"line-{number}"


def read_numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1."""
    with path.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            if text.strip():
                yield number, text


def parse_line(text: bytes) -> Line | Outcome:
    """Return a line's request. If the line is invalid, return its outcome, without an `id` yet."""
    try:
        line = msgspec.json.decode(text, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Outcome("", _custom_id(text), error=BatchError("invalid_line", str(error)))
    problem = None
    if not re.fullmatch("/[!-~]*", line.url):
        problem = f"url: {line.url!r} is not a path in ASCII, such as /v1/chat/completions"
    elif line.body.get("stream"):
        problem = "body.stream: a batch does not stream answers; leave it out"
    if problem is not None:
        return Outcome("", line.custom_id, error=BatchError("invalid_line", problem))
    return line


@contextmanager
def open_output(path: Path) -> Generator[BinaryIO]:
    """Open a file to append outcomes to. A new file is removed if the batch cannot begin.

    Raises ConfigurationError if the file cannot be read and written.
    """
    try:
        is_new = _create(path)
        output = path.open("ab+", buffering=0)
    except OSError as error:
        raise ConfigurationError(f"--output {path}: {error.strerror}") from None
    with output:
        try:
            yield output
        except ConfigurationError:
            if is_new:
                path.unlink()
            raise


def _create(path: Path) -> bool:
    """Create the file, and return whether there was none of this name, not even a broken link."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def read_outcomes(path: Path) -> dict[str, str | None]:
    """Return the `custom_id` of each outcome that an output has, by the outcome's id.

    A last line without a newline was cut off when its writer was killed. It is removed from the
    file. Raises ConfigurationError if the file holds anything but outcomes.
    """
    with path.open("rb+") as file:
        found: dict[str, str | None] = {}
        end = 0
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                file.truncate(end)
                break
            end += len(text)
            try:
                outcome = msgspec.json.decode(text, type=Outcome)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigurationError(
                    f"{path}, line {number}: not the output of a batch ({error}); choose another "
                    "--output"
                ) from None
            found[outcome.id] = outcome.custom_id
    return found


def _custom_id(text: bytes) -> str | None:
    """Return the `custom_id` of a line that is not valid, if it has one."""
    try:
        return msgspec.json.decode(text, type=_WithId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
