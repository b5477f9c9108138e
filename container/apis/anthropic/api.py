"""Anthropic's messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from flask import Flask, Response

from container.apis.anthropic.response import MessagesResponse
from container.apis.anthropic.schema import read_count_request, read_messages_request
from container.apis.chat.turn import Assistant
from container.apis.generation.service import GenerationService
from container.http.request_context import request_context
from container.http.service import json_response


class MessagesRoutes:
    """The routes of the messages API; clients use the `base_url` http://HOST:PORT."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._assistant = Assistant(service)

    def add_to(self, app: Flask) -> None:
        app.add_url_rule("/v1/messages", view_func=self.create_message, methods=["POST"])
        app.add_url_rule("/v1/messages/count_tokens", view_func=self.count_tokens, methods=["POST"])

    def create_message(self) -> Response:
        context = request_context()
        body = context.json_fields()
        request = context.checked(lambda: read_messages_request(body))
        context.warn(request.warnings)
        started = self._assistant.start(context, request.turn)
        id = f"msg_{request.request_id or context.id}"
        response = MessagesResponse(started, id, stream=request.stream)
        return self._service.send(context, response, "named_sse")

    def count_tokens(self) -> Response:
        context = request_context()
        body = context.json_fields()
        conversation, warnings = context.checked(lambda: read_count_request(body))
        context.warn(warnings)
        prompt = self._service.encode_chat(context, conversation)
        return json_response({"input_tokens": len(prompt.token_ids)})
