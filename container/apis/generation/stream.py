"""The bytes of a stream: JSON lines or server-sent events, always whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from container.apis.generation.answer import Answer, Record
from container.http.failures import describe
from container.http.patience import ClientGoneError

StreamFormat = Literal["jsonlines", "sse"]
MIMETYPES: Mapping[StreamFormat, str] = {
    "jsonlines": "application/jsonlines",
    "sse": "text/event-stream",
}
_DONE = b"data: [DONE]\n\n"


def stream_lines(
    answer: Answer, pieces: Iterable[Sequence[Record | str]], form: StreamFormat, request_id: str
) -> Iterator[bytes]:
    """The body of a stream; a record that is text is sent as it is, as a line.

    A failure is its last record, since the status has been sent.
    """
    try:
        for records in pieces:
            if records:
                yield b"".join(_encode(record, form) for record in records)
    except ClientGoneError:
        return
    except Exception as error:
        yield _encode(answer.failure(describe(error, request_id)), form)
    if form == "sse" and answer.ends_with_done:
        yield _DONE


def _encode(record: Record | str, form: StreamFormat) -> bytes:
    if isinstance(record, str):
        return record.rstrip("\n").encode() + (b"\n\n" if form == "sse" else b"\n")
    data = msgspec.json.encode(record)
    return b"data: " + data + b"\n\n" if form == "sse" else data + b"\n"
