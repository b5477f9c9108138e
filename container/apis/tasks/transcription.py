"""OpenAI's audio routes, for speech models: transcriptions, and translations into English."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from flask import Response
from werkzeug.exceptions import UnsupportedMediaType

from container.apis.tasks.service import TaskService
from container.apis.tasks.subtitles import as_srt, as_vtt
from container.http.request_context import RequestContext, request_context
from container.http.route import Api, Body, post
from container.http.service import json_response
from container.schema.fields import (
    MODEL_IGNORED,
    Field,
    Fields,
    Values,
    read_fields,
    unsupported,
)
from container.schema.form import MIMETYPE, read_form
from container.schema.kinds import ANYTHING, BOOLEAN, STRING, STRINGS, Kind, number, with_schema
from core.configuration.pipeline_tasks import SPEECH_RECOGNITION
from core.errors import RequestError
from core.protocol.task_bodies import (
    TRANSCRIPTION,
    Passage,
    PipelineBody,
    Transcript,
    Transcription,
)

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
GRANULARITIES = ("segment", "word")

_FILE = Kind(
    "a file", lambda value: isinstance(value, bytes), {"type": "string", "format": "binary"}
)
_ONE_SPEAKER = unsupported(ANYTHING, instead="speakers are not distinguished")
TRANSCRIPTION_FIELDS: Fields = {
    "file": Field(_FILE, "A WAV file of PCM samples, at most 10 minutes long."),
    "model": MODEL_IGNORED,
    "language": Field(
        STRING, "Whisper: the spoken language, as an ISO-639-1 code or its English name."
    ),
    "prompt": Field(
        STRING,
        "Whisper: a text whose style the answer follows. Only the end of a long text counts.",
    ),
    "response_format": Field(
        with_schema(STRING, {"enum": list(FORMATS)}),
        "json (default), text, srt, verbose_json or vtt.",
    ),
    "temperature": Field(
        number(0, 1),
        "Whisper: 0 (default) makes the answer deterministic. Above 0, tokens are sampled.",
    ),
    "timestamp_granularities": Field(
        with_schema(STRINGS, {"items": {"enum": list(GRANULARITIES)}}),
        "With verbose_json: return the times of each segment (default), each word, or both. With "
        "both, the model runs twice.",
    ),
    "stream": unsupported(BOOLEAN, False),
    "include": unsupported(STRINGS, []),
    "chunking_strategy": unsupported(ANYTHING, "auto"),
    "keywords": unsupported(STRINGS, [], instead="put them into prompt"),
    "languages": unsupported(STRINGS, [], instead="use language"),
    "known_speaker_names": _ONE_SPEAKER,
    "known_speaker_references": _ONE_SPEAKER,
}
"""The fields of both routes."""


def transcribe(service: TaskService) -> Response:
    return _answer(service, request_context(), translates=False)


def translate(service: TaskService) -> Response:
    return _answer(service, request_context(), translates=True)


def _answer(service: TaskService, context: RequestContext, *, translates: bool) -> Response:
    if service.task.name != SPEECH_RECOGNITION:
        raise RequestError(
            "model", f"is for {service.task.name}; this route needs {SPEECH_RECOGNITION}"
        )
    values = read_fields(_form(context), TRANSCRIPTION_FIELDS)
    context.warn(values.warnings)
    wanted = read_transcription(values, translates=translates)
    file = values.get("file", b"")
    if not file:
        raise RequestError("file", "expected a WAV file")
    body = PipelineBody([file], False, {TRANSCRIPTION: msgspec.to_builtins(wanted)})
    reply = service.client.choose().perform(msgspec.msgpack.encode(body), {})
    try:
        answer = service.wait_for(context, reply)
    except RequestError as error:
        if error.field == "inputs":  # other routes take the file in this field
            raise RequestError("file", error.message) from None
        raise
    transcript = msgspec.json.decode(answer.body, type=Transcript)
    return _response(transcript, values.get("response_format", "json"), wanted)


def _form(context: RequestContext) -> dict[str, object]:
    """Parse a form with files. Convert its texts to the types that the fields expect.

    Raises UnsupportedMediaType for other types and RequestError for a malformed form.
    """
    if context.mimetype != MIMETYPE:
        raise UnsupportedMediaType(f"Content-Type {context.mimetype}: send {MIMETYPE}")
    content_type = context.headers.get("Content-Type", "")
    return context.checked(lambda: read_form(context.body, content_type, TRANSCRIPTION_FIELDS))


def read_transcription(values: Values, *, translates: bool) -> Transcription:
    """Return the transcription to make. Raises RequestError naming the first bad field."""
    response_format = values.get("response_format", "json")
    if response_format not in FORMATS:
        raise RequestError("response_format", f"expected one of {', '.join(FORMATS)}")
    temperature = values.get("temperature", 0.0)
    is_verbose = response_format == "verbose_json"
    granularities = _granularities(values, is_verbose=is_verbose)
    return Transcription(
        translates=translates,
        language=values.get("language", None),
        prompt=values.get("prompt", None),
        temperature=temperature,
        segments="segment" in granularities or response_format in ("srt", "vtt"),
        words="word" in granularities,
        names_language=is_verbose,
    )


def _granularities(values: Values, *, is_verbose: bool) -> Sequence[str]:
    field = "timestamp_granularities"
    given: Sequence[str] = values.get(field, ())
    if given and not is_verbose:
        raise RequestError(field, "needs response_format verbose_json")
    for name in given:
        if name not in GRANULARITIES:
            raise RequestError(field, f"expected {' or '.join(GRANULARITIES)}")
    return given or (["segment"] if is_verbose else [])


def _response(transcript: Transcript, response_format: str, wanted: Transcription) -> Response:
    text = transcript.text.strip()
    usage = {"type": "duration", "seconds": math.ceil(transcript.duration)}
    match response_format:
        case "text":
            return Response(f"{text}\n", mimetype="text/plain")
        case "srt":
            return Response(as_srt(transcript.segments or []), mimetype="text/plain")
        case "vtt":
            return Response(as_vtt(transcript.segments or []), mimetype="text/vtt")
        case "verbose_json":
            return json_response(
                {
                    "task": "translate" if wanted.translates else "transcribe",
                    "duration": transcript.duration,
                    "text": text,
                    **_details(transcript),
                    "usage": usage,
                }
            )
        case _:
            return json_response({"text": text, "usage": usage})


def _details(transcript: Transcript) -> dict[str, object]:
    """Return the fields of verbose_json that not every transcript has."""
    details: dict[str, object] = {}
    if transcript.language is not None:
        details["language"] = transcript.language
    if transcript.segments is not None:
        details["segments"] = [
            {"id": id, **_times(span), "text": span.text}
            for id, span in enumerate(transcript.segments)
        ]
    if transcript.words is not None:
        details["words"] = [
            {"word": span.text.strip(), **_times(span)} for span in transcript.words
        ]
    return details


def _times(span: Passage) -> dict[str, float]:
    return {"start": span.start, "end": span.end}


_SPEECH = (
    Body(
        "Transcription",
        TRANSCRIPTION_FIELDS,
        ("file",),
        title="`/v1/audio/transcriptions`, `/v1/audio/translations`",
        is_form=True,
    ),
)
AUDIO = Api(
    "OpenAI",
    (
        post("/v1/audio/transcriptions", "Transcribe speech.", transcribe, *_SPEECH),
        post("/v1/audio/translations", "Translate speech to English text.", translate, *_SPEECH),
    ),
    kinds=("pipeline",),
)  # fmt: skip
