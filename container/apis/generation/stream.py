"""The bytes of a stream: JSON lines or server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import msgspec
from flask import Response

from container.apis.generation.reply import ApiResponse, Reply, StreamRecord
from container.http.client_connection import SendChunk
from container.http.deadline import ClientGoneError
from container.http.request_context import RequestContext
from container.http.service import json_response

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How the records of a stream are written."""

    mimetype: str
    begin: bytes
    """Precedes a record."""
    end: bytes
    """Follows a record."""
    names_events: bool = False
    """Whether the `type` of a record is its event's name."""


JSON_LINES = StreamFormat("application/jsonlines", b"", b"\n")
EVENTS = StreamFormat("text/event-stream", b"data: ", b"\n\n")
NAMED_EVENTS = StreamFormat("text/event-stream", b"data: ", b"\n\n", names_events=True)


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
    streamed = Response(lines, content_type=stream_format.mimetype)
    # A generator that never started runs no `finally`, so closing the response must abort.
    streamed.call_on_close(response.abort)
    return streamed


def stream_lines(
    response: ApiResponse,
    chunks: Iterable[Sequence[StreamRecord | str]],
    stream_format: StreamFormat,
    context: RequestContext,
) -> Iterator[bytes]:
    """Yield the body of a stream in whole lines or events.

    A str is sent as it is, except that the newlines at its end become those of the format. A
    failure becomes the last record, since the status has been sent. If the client has
    disconnected, the stream just ends.
    """

    encode = partial(_encode_all, stream_format)
    try:
        for records in chunks:
            if records:
                yield encode(records)
                # All parts so far have been sent.
                if context.send_chunk is not None and isinstance(response, Reply):
                    response.divert(partial(_send, context.send_chunk, encode))
    except (ClientGoneError, GeneratorExit):
        context.note_client_gone()
        return
    except Exception as error:
        yield _encode(response.failure(context.describe(error)), stream_format)
    if response.ends_with_done and stream_format is EVENTS:
        yield _DONE


def _send(
    send_chunk: SendChunk,
    encode: Callable[[Sequence[StreamRecord]], bytes],
    records: Sequence[StreamRecord],
) -> bool:
    return not records or send_chunk(encode(records))


def _encode_all(stream_format: StreamFormat, records: Sequence[StreamRecord | str]) -> bytes:
    return b"".join([_encode(record, stream_format) for record in records])


def _encode(record: StreamRecord | str, stream_format: StreamFormat) -> bytes:
    if isinstance(record, str):
        return record.rstrip("\n").encode() + stream_format.end
    begin, end = stream_format.begin, stream_format.end
    if isinstance(record, bytes):
        return begin + record + end
    if stream_format.names_events:
        begin = f"event: {record['type']}\n".encode() + begin
    return begin + msgspec.json.encode(record) + end
