"""OpenAI's responses API: POST /v1/responses. Nothing is stored."""

from __future__ import annotations

import time

from flask import Flask, Response

from container.apis.chat.turn import Assistant
from container.apis.generation.service import GenerationService
from container.apis.responses.response import ResponsesResponse
from container.apis.responses.schema import read_responses_request
from container.http.request_context import request_context


class ResponsesRoutes:
    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._assistant = Assistant(service)

    def add_to(self, app: Flask) -> None:
        app.add_url_rule("/v1/responses", view_func=self.create_response, methods=["POST"])

    def create_response(self) -> Response:
        context = request_context()
        body = context.json_fields()
        request = context.checked(lambda: read_responses_request(body))
        context.warn(request.warnings)
        started = self._assistant.start(context, request.turn)
        id = f"resp_{request.request_id or context.id}"
        response = ResponsesResponse(
            started, request, id, int(time.time()), self._service.prompting.tokenizer.piece
        )
        return self._service.send(context, response, "named_sse")
