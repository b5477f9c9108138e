"""The list of models, which here is one and its adapters, as OpenAI and as DJL Serving give it."""

from __future__ import annotations

import time
from typing import NoReturn

from flask import Flask, Response, abort, request
from werkzeug.exceptions import MethodNotAllowed

from container.apis.models.schema import read_page_request
from container.apis.models.status import ModelStatus, list_models
from container.http.host import Host, json_response


class ModelRoutes:
    """The one model, whatever it does, and its adapters."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._created = int(time.time())

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        app.add_url_rule("/v1/models", view_func=self.models)
        app.add_url_rule("/v1/models/<path:name>", view_func=self.model)
        app.add_url_rule("/models", view_func=self.listing)
        app.add_url_rule("/models", view_func=self.refuse, methods=["POST"])
        app.add_url_rule("/models/<name>", view_func=self.describe)
        app.add_url_rule("/models/<name>", view_func=self.refuse, methods=["DELETE"])

    def models(self) -> Response:
        """The list."""
        return json_response({"object": "list", "data": list(self._models().values())})

    def model(self, name: str) -> Response:
        """The model, by its name."""
        models = self._models()
        if name not in models:
            abort(404, f"no model '{name}'; this server has {', '.join(map(repr, models))}")
        return json_response(models[name])

    def listing(self) -> Response:
        """DJL Serving's list."""
        asked = read_page_request(request.args)
        return json_response(list_models([self._status()], asked))

    def describe(self, name: str) -> Response:
        """DJL Serving's description of the model, by its name."""
        if name != self._host.model_name:
            abort(404, f"no model '{name}'; this server has '{self._host.model_name}'")
        return json_response(self._status().whole())

    def refuse(self, name: str = "") -> NoReturn:
        """Loading and unloading are for a container of several models."""
        raise MethodNotAllowed(
            ["GET"],
            f"this container serves '{self._host.model_name}' alone; start it with "
            "SAGEMAKER_MULTI_MODEL=true to load and unload models",
        )

    def _status(self) -> ModelStatus:
        return ModelStatus(self._host.model_name, self._host.client.facts.model, "READY")

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
