"""SageMaker's and DJL Serving's routes, where the fields of a body say which schema it has."""

from __future__ import annotations

from flask import Flask, Response, abort, request
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from container.answers.stream import MIMETYPES, StreamFormat
from container.failures import Failure, failure_response
from container.metrics import MIMETYPE as METRICS_MIMETYPE
from container.metrics import metrics_text
from container.routes.chat import ChatApi
from container.routes.completions import CompletionsApi
from container.routes.sessions import SessionRequests
from container.routes.text import TextApi
from container.service import Service, json_response


class Invocations:
    """One door for all schemas."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._text = TextApi(service)
        self._chat = ChatApi(service)
        self._completions = CompletionsApi(service)
        self._sessions = SessionRequests(service.options)

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        app.add_url_rule("/ping", view_func=self.ping, methods=["GET", "POST"])
        app.add_url_rule("/metrics", view_func=self.metrics)
        app.add_url_rule("/invocations", view_func=self.invoke, methods=["POST"])
        app.add_url_rule("/predictions/<model>", view_func=self.predict, methods=["POST"])

    def ping(self) -> Response:
        """200 while requests would be answered."""
        health = self._service.client.health()
        if not health.healthy:
            return failure_response(Failure(503, health.reason))
        return json_response({"status": "healthy"})

    def metrics(self) -> Response:
        """What the engine is doing, for Prometheus; an error while it is not ready."""
        client, name = self._service.client, self._service.model_name
        text = metrics_text(client.facts, client.stats, name)
        return Response(text, content_type=METRICS_MIMETYPE)

    def predict(self, model: str) -> Response:
        """DJL Serving's path for a model by its name."""
        if model != self._service.model_name:
            abort(404, f"no model '{model}'; this container serves '{self._service.model_name}'")
        return self.invoke()

    def invoke(self) -> Response:
        """SageMaker's path."""
        return self.answer(request.headers.get("Accept"))

    def answer(self, accept: str | None) -> Response:
        """Answers the current request; `accept` is what its client says it takes."""
        body, form = self._service.read(), self._stream_format(accept)
        about_session = self._sessions.answer(body)
        if about_session is not None:
            return about_session
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
