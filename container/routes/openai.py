"""OpenAI's routes."""

from __future__ import annotations

from flask import Flask, Response

from container.routes.chat import ChatApi
from container.service import Service


class OpenAIRoutes:
    """What OpenAI's clients call below their `base_url`, which is `http://.../v1`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chat = ChatApi(service)

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        app.add_url_rule("/v1/chat/completions", view_func=self.chat, methods=["POST"])

    def chat(self) -> Response:
        """A chat completion."""
        return self._chat.answer(self._service.read_json(), "sse")
