"""The bytes of a stream: JSON lines or server-sent events.

The events of `named_sse` have the `type` of their record as their name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal

import msgspec
from flask import Response

from container.apis.generation.reply import ApiResponse, Record
from container.http.deadline import ClientGoneError
from container.http.request_context import RequestContext
from container.http.service import json_response

StreamFormat = Literal["jsonlines", "sse", "named_sse"]
MIMETYPES: Mapping[StreamFormat, str] = {
    "jsonlines": "application/jsonlines",
    "sse": "text/event-stream",
    "named_sse": "text/event-stream",
}
_DONE = b"data: [DONE]\n\n"


def send(context: RequestContext, response: ApiResponse, stream_format: StreamFormat) -> Response:
    """Return the HTTP response, after all tokens or, if streaming, after the first ones.

    No status is sent before that. So an earlier failure is raised, and the response gets the
    status of that failure.
    """
    try:
        if not response.stream:
            return json_response(response.document())
        records = response.records()
        first = next(records)
    except BaseException:
        response.abort()
        raise
    lines = stream_lines(response, chain([first], records), stream_format, context)
    streamed = Response(lines, content_type=MIMETYPES[stream_format])
    # A generator that never started runs no `finally`, so closing the response must abort.
    streamed.call_on_close(response.abort)
    return streamed


def stream_lines(
    response: ApiResponse,
    chunks: Iterable[Sequence[Record | str]],
    stream_format: StreamFormat,
    context: RequestContext,
) -> Iterator[bytes]:
    """Yield the body of a stream in whole lines or events.

    A str is sent as it is, except that the newlines at its end become those of the format. A
    failure becomes the last record, since the status has been sent. If the client has
    disconnected, the stream just ends.
    """
    try:
        for records in chunks:
            if records:
                yield b"".join(_encode(record, stream_format) for record in records)
    except (ClientGoneError, GeneratorExit):
        context.note_client_gone()
        return
    except Exception as error:
        yield _encode(response.failure(context.describe(error)), stream_format)
    if stream_format == "sse" and response.ends_with_done:
        yield _DONE


def _encode(record: Record | str, stream_format: StreamFormat) -> bytes:
    if isinstance(record, str):
        end = b"\n" if stream_format == "jsonlines" else b"\n\n"
        return record.rstrip("\n").encode() + end
    data = msgspec.json.encode(record)
    if stream_format == "jsonlines":
        return data + b"\n"
    name = f"event: {record['type']}\n" if stream_format == "named_sse" else ""
    return name.encode() + b"data: " + data + b"\n\n"
