"""Which API a body of /invocations means, and the user's formatters around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from flask import Response
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from container.apis.chat.api import CHAT_BODY, start_chat
from container.apis.completions.api import COMPLETION_BODY, start_completion
from container.apis.generation.formatters import Formatters
from container.apis.generation.reply import ApiResponse, Record, decoded
from container.apis.generation.service import GenerationService
from container.apis.generation.stream import EVENTS, JSON_LINES, StreamFormat, send
from container.apis.text.api import start_text
from container.apis.text.response import RollingFormat, TextFormat
from container.apis.text.tgi import TEXT_BODY
from container.apis.text.tgi_response import TgiListFormat
from container.http.request_context import RequestContext
from container.http.route import Invocation
from core.configuration.options import Options, ServerOptions


def invocation(options: Options, formatters: Formatters | None = None) -> Invocation:
    """Return what /invocations means for models that generate text.

    formatters: the user's own. As in LMI, only /invocations and its aliases use them.
    """
    form, formats = text_format_of(options), stream_formats_of(options.server)

    def read(service: GenerationService, context: RequestContext) -> Mapping[str, object]:
        body = context.fields()
        return body if formatters is None else formatters.format_input(body)

    def answer(
        service: GenerationService, context: RequestContext, body: Mapping[str, object]
    ) -> Response:
        stream_format = preferred(formats, context.accept)
        reply = start(service, context, body, form)
        if formatters is not None:
            reply = FormattedReply(reply, formatters.format_output)
        return send(context, reply, stream_format)

    return Invocation("generation", read, answer, (TEXT_BODY, CHAT_BODY, COMPLETION_BODY))


def start(
    service: GenerationService,
    context: RequestContext,
    body: Mapping[str, object],
    form: type[TextFormat],
) -> ApiResponse:
    """Start to answer a body with `messages`, `prompt` or, if it has neither, `inputs`.

    form: that of answers to `inputs`.
    """
    if "messages" in body:
        return start_chat(service, context, body)
    if "prompt" in body:
        return start_completion(service, context, body)
    return start_text(service.generations, context, body, form)


def text_format_of(options: Options) -> type[TextFormat]:
    """Return the form of answers to `inputs` that the options ask for."""
    if options.server.tgi_compat:
        return TgiListFormat
    default = options.strategy.rolling_batch in (None, "auto")
    is_async = default if options.server.async_mode is None else options.server.async_mode
    return TextFormat if is_async else RollingFormat


def stream_formats_of(server: ServerOptions) -> tuple[StreamFormat, StreamFormat]:
    """Return the format that the options ask for, then the one that clients may ask for."""
    is_sse = server.output_formatter == "sse" or server.tgi_compat
    return (EVENTS, JSON_LINES) if is_sse else (JSON_LINES, EVENTS)


def preferred(formats: tuple[StreamFormat, StreamFormat], accept: str | None) -> StreamFormat:
    """Return the first format, unless the client prefers the other one."""
    configured, other = formats
    accepted = parse_accept_header(accept, MIMEAccept)
    is_other = accepted.best_match([configured.mimetype, other.mimetype]) == other.mimetype
    return other if is_other else configured


class FormattedReply:
    """A reply whose document or records, except failures, go through the output_formatter."""

    def __init__(self, reply: ApiResponse, format_output: Callable[[object], object]) -> None:
        self.stream = reply.stream
        self.ends_with_done = reply.ends_with_done
        self.failure = reply.failure
        self.abort = reply.abort
        self._reply = reply
        self._format = format_output

    def document(self) -> object:
        return self._format(self._reply.document())

    def records(self) -> Iterator[list[Record | str]]:
        for records in self._reply.records():
            values = [each if isinstance(each, str) else decoded(each) for each in records]
            yield [cast(Record | str, self._format(value)) for value in values]
