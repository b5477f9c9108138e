"""The routes to the text generation APIs: /invocations for all of them, and OpenAI's own."""

from __future__ import annotations

from collections.abc import Mapping

from flask import Flask, Response
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from container.apis.chat.api import ChatApi
from container.apis.completions.api import CompletionsApi
from container.apis.generation.formatters import Formatters
from container.apis.generation.response import FormattedResponse
from container.apis.generation.service import GenerationService
from container.apis.generation.stream import MIMETYPES, StreamFormat
from container.apis.text.api import TextApi
from container.http.request_context import RequestContext, request_context


class GenerationApi:
    """Answers requests to /invocations, where the body's fields select the API."""

    def __init__(self, service: GenerationService, formatters: Formatters | None = None) -> None:
        """formatters: the user's own. As in LMI, only /invocations and its aliases use them."""
        self._service = service
        self._formatters = formatters
        self._text = TextApi(service)
        self._chat = ChatApi(service)
        self._completions = CompletionsApi(service)

    def read(self, context: RequestContext) -> Mapping[str, object]:
        """Parse a body of any supported type and pass it through the user's input_formatter.

        Raises GenerationError if the formatter fails, and what `RequestContext.fields` raises.
        """
        body = context.fields()
        return body if self._formatters is None else self._formatters.format_input(body)

    def answer(self, context: RequestContext, body: Mapping[str, object]) -> Response:
        """Answer a body with `messages`, `prompt` or, if it has neither, `inputs`."""
        api = self._text
        if "messages" in body:
            api = self._chat
        elif "prompt" in body:
            api = self._completions
        stream_format = self._stream_format(context.accept)
        response = api.start(context, body)
        if self._formatters is not None:
            response = FormattedResponse(response, self._formatters)
        return self._service.send(context, response, stream_format)

    def _stream_format(self, accept: str | None) -> StreamFormat:
        """Return the configured format, unless the client prefers the other one."""
        options = self._service.options
        is_sse = options.server.output_formatter == "sse" or options.server.tgi_compat
        configured: StreamFormat = "sse" if is_sse else "jsonlines"
        other: StreamFormat = "jsonlines" if is_sse else "sse"
        accepted = parse_accept_header(accept, MIMEAccept)
        preferred = accepted.best_match([MIMETYPES[configured], MIMETYPES[other]])
        return other if preferred == MIMETYPES[other] else configured


class OpenAIRoutes:
    """OpenAI's routes; clients use the `base_url` http://HOST:PORT/v1."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._chat = ChatApi(service)
        self._completions = CompletionsApi(service)

    def add_to(self, app: Flask) -> None:
        app.add_url_rule("/v1/chat/completions", view_func=self.chat, methods=["POST"])
        app.add_url_rule("/v1/completions", view_func=self.completions, methods=["POST"])

    def chat(self) -> Response:
        context = request_context()
        response = self._chat.start(context, context.json_fields())
        return self._service.send(context, response, "sse")

    def completions(self) -> Response:
        context = request_context()
        response = self._completions.start(context, context.json_fields())
        return self._service.send(context, response, "sse")
