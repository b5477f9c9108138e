"""Text generation, where the fields of a body say which schema it has."""

from __future__ import annotations

from collections.abc import Mapping

from flask import Response
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from container.apis.chat.api import ChatApi
from container.apis.completions.api import CompletionsApi
from container.apis.generation.service import Service
from container.apis.generation.stream import MIMETYPES, StreamFormat
from container.apis.text.api import TextApi


class GenerationApi:
    """All schemas."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._text = TextApi(service)
        self._chat = ChatApi(service)
        self._completions = CompletionsApi(service)

    def read(self) -> Mapping[str, object]:
        """The fields of a body of any served type."""
        return self._service.read()

    def answer(self, body: Mapping[str, object], accept: str | None) -> Response:
        """By `messages`, `prompt` or `inputs`."""
        form = self._stream_format(accept)
        if "messages" in body:
            return self._chat.answer(body, form)
        if "prompt" in body:
            return self._completions.answer(body, form)
        return self._text.answer(body, form)

    def _stream_format(self, accept: str | None) -> StreamFormat:
        options = self._service.options
        is_sse = options.output_formatter == "sse" or options.tgi_compat
        configured: StreamFormat = "sse" if is_sse else "jsonlines"
        other: StreamFormat = "jsonlines" if configured == "sse" else "sse"
        accepts = parse_accept_header(accept, MIMEAccept)
        accepted = accepts.best_match([MIMETYPES[configured], MIMETYPES[other]])
        return other if accepted == MIMETYPES[other] else configured
