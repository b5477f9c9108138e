"""OpenAI's list of models: the one, and the adapters that answer under names of their own."""

from __future__ import annotations

import time

from flask import Flask, Response, abort

from container.host import Host, json_response


class ModelRoutes:
    """The one model, whatever it does, and its adapters."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._created = int(time.time())

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        app.add_url_rule("/v1/models", view_func=self.models)
        app.add_url_rule("/v1/models/<path:name>", view_func=self.model)

    def models(self) -> Response:
        """The list."""
        return json_response({"object": "list", "data": list(self._models().values())})

    def model(self, name: str) -> Response:
        """The model, by its name."""
        models = self._models()
        if name not in models:
            abort(404, f"no model '{name}'; this server has {', '.join(map(repr, models))}")
        return json_response(models[name])

    def _models(self) -> dict[str, dict[str, object]]:
        """By their names. Adapters have vLLM's fields beside OpenAI's."""
        own, max_model_len = self._host.model_name, self._host.client.facts.max_model_len
        model: dict[str, object] = {
            "object": "model",
            "created": self._created,
            "owned_by": "longshore",
            **({"max_model_len": max_model_len} if max_model_len else {}),
        }
        adapters = {
            each.name: {"id": each.name, **model, "root": each.src, "parent": own}
            for each in self._host.client.adapters
        }
        return {own: {"id": own, **model}, **adapters}
