"""The shapes of an answer in LMI's text schema: one JSON object, or a stream of whole lines."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from container.generation import ClientGoneError, Generation
from core.errors import LongshoreError
from core.sampling import Finish
from core.text.answer import TokenText

logger = logging.getLogger(__name__)

StreamFormat = Literal["jsonlines", "sse"]
MIMETYPES: Mapping[StreamFormat, str] = {
    "jsonlines": "application/jsonlines",
    "sse": "text/event-stream",
}


def encode_line(record: object, form: StreamFormat) -> bytes:
    """One record as a whole line, or a whole event, of the stream."""
    data = msgspec.json.encode(record)
    return b"data: " + data + b"\n\n" if form == "sse" else data + b"\n"


def whole_answer(generation: Generation) -> dict[str, object]:
    """The body of an answer that does not stream."""
    answer: dict[str, object] = {"generated_text": generation.generated_text}
    if generation.request.details:
        tokens = [_token(token) for token in generation.tokens]
        answer["details"] = {**_details(generation, generation.finish), "tokens": tokens}
    return answer


def stream_lines(
    generation: Generation,
    batches: Iterable[list[TokenText]],
    form: StreamFormat,
    request_id: str,
) -> Iterator[bytes]:
    """The body of a stream: each piece is whole lines, the last line is the only terminal one."""
    try:
        for batch in batches:
            records = _records(generation, batch)
            if records:
                yield b"".join(encode_line(record, form) for record in records)
    except ClientGoneError:
        return
    except LongshoreError as error:
        logger.warning("request=%s event=failed reason=%r", request_id, str(error))
        yield encode_line(_failure(generation, str(error)), form)
    except Exception:
        logger.exception("request=%s event=failed", request_id)
        yield encode_line(_failure(generation, "internal error"), form)


def _records(generation: Generation, batch: list[TokenText]) -> list[dict[str, object]]:
    records: list[dict[str, object]] = [{"token": _token(token)} for token in batch]
    if generation.finish is None:
        return records
    if not records:
        records = [{"token": _no_token()}]
    records[-1]["generated_text"] = generation.generated_text
    if generation.request.details:
        records[-1]["details"] = _details(generation, generation.finish)
    return records


def _token(token: TokenText) -> dict[str, object]:
    return {"id": token.id, "text": token.text, "log_prob": token.logprob}


def _no_token() -> dict[str, object]:
    """LMI's stand-in where a terminal line has no token of its own."""
    return {"id": -1, "text": "", "log_prob": -1, "special_token": True}


def _details(generation: Generation, finish: Finish | None) -> dict[str, object]:
    return {
        "finish_reason": finish,
        "generated_tokens": len(generation.tokens),
        "inputs": generation.request.inputs,
    }


def _failure(generation: Generation, message: str) -> dict[str, object]:
    return {
        "token": {**_no_token(), "error_msg": message},
        "generated_text": "",
        "details": _details(generation, Finish.ERROR),
    }
