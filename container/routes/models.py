"""OpenAI's list of models, which here has one."""

from __future__ import annotations

import time

from flask import Flask, Response, abort

from container.host import Host, json_response


class ModelRoutes:
    """The one model, whatever it does."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._created = int(time.time())

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        app.add_url_rule("/v1/models", view_func=self.models)
        app.add_url_rule("/v1/models/<path:name>", view_func=self.model)

    def models(self) -> Response:
        """The list."""
        return json_response({"object": "list", "data": [self._model()]})

    def model(self, name: str) -> Response:
        """The model, by its name."""
        if name != self._host.model_name:
            abort(404, f"no model '{name}'; this server has '{self._host.model_name}'")
        return json_response(self._model())

    def _model(self) -> dict[str, object]:
        model: dict[str, object] = {
            "id": self._host.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "longshore",
        }
        max_model_len = self._host.client.facts.max_model_len
        return {**model, "max_model_len": max_model_len} if max_model_len else model
