"""The WSGI application in front of several models."""

from __future__ import annotations

from urllib.parse import quote

from flask import Flask, Response, request

from container.apis.models.schema import read_load_request, read_page_request
from container.apis.models.status import list_models
from container.front_end.openapi import multi_model_document
from container.http.failures import Failure, failure_response, register_failures
from container.http.headers import register_headers
from container.http.host import json_response
from container.http.metrics import MIMETYPE as METRICS_MIMETYPE
from container.multi_model.metrics import merged_metrics
from container.multi_model.model import RefusedError
from container.multi_model.models import Models
from container.multi_model.relay import relay
from container.schema.body import read_body

MAX_BODY_BYTES = 2**16
"""Of what is asked of this application itself; a model's container has a limit of its own."""
_TARGET = "X-Amzn-SageMaker-Target-Model"
_EXAMPLE = '{"model_name": "...", "url": "..."}'
_SAFE = "/:@!$&'()*+,;=~"
"""Characters of a path that mean the same unquoted, beside letters and digits."""
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_PATHS_OF_ONE_MODEL = (
    "/invocations",
    "/endpoints/<path:rest>",
    "/v1/<path:rest>",
    "/tokenize",
    "/detokenize",
)
"""A header says whose they are."""


def create_front(models: Models) -> Flask:
    """The routes of SageMaker's multi-model contract, and all of each model's own."""
    app = Flask("longshore", static_folder=None)
    routes = Routes(models)
    routes.add_to(app)
    register_headers(app)
    register_failures(app)
    app.register_error_handler(RefusedError, _refused)
    return app


def _refused(error: RefusedError) -> Response:
    return failure_response(Failure(error.code, str(error), error.field))


class Routes:
    """Over the models that are loaded."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        app.add_url_rule("/ping", view_func=self.ping, methods=["GET", "POST"])
        app.add_url_rule("/metrics", view_func=self.metrics)
        app.add_url_rule("/models", view_func=self.list)
        app.add_url_rule("/models", view_func=self.load, methods=["POST"])
        app.add_url_rule("/models/<name>", view_func=self.describe)
        app.add_url_rule("/models/<name>", view_func=self.unload, methods=["DELETE"])
        app.add_url_rule("/models/<name>/invoke", view_func=self.invoke, methods=["POST"])
        app.add_url_rule("/models/<name>/<path:rest>", view_func=self.pass_on, methods=_METHODS)
        app.add_url_rule("/predictions/<name>", view_func=self.invoke, methods=["POST"])
        for path in _PATHS_OF_ONE_MODEL:
            app.add_url_rule(path, view_func=self.pass_by_header, methods=_METHODS)
        document = multi_model_document()
        app.add_url_rule("/openapi.json", "openapi", lambda: json_response(document))

    def ping(self) -> Response:
        """200 while models may be loaded, and those that are there at the start are."""
        if not self._models.is_open:
            return failure_response(Failure(503, "the models of the store are being loaded"))
        return json_response({"status": "healthy"})

    def metrics(self) -> Response:
        """Those of all models."""
        text = merged_metrics(self._models.sockets())
        return Response(text, content_type=METRICS_MIMETYPE)

    def list(self) -> Response:
        """A page of the models."""
        asked = read_page_request(request.args)
        return json_response(list_models(self._models.listed(), asked))

    def load(self) -> Response:
        """Loads a model; the answer comes when it is ready."""
        request.max_content_length = MAX_BODY_BYTES
        body = read_body(request.get_data(), "application/json", _EXAMPLE)
        asked = read_load_request(body)
        self._models.load(asked.name, asked.url)
        return json_response({"status": f"Model '{asked.name}' loaded"})

    def describe(self, name: str) -> Response:
        """One model."""
        return json_response(self._models.describe(name).whole())

    def unload(self, name: str) -> Response:
        """Unloads a model; the answer comes when nothing of it is left."""
        self._models.unload(name)
        return json_response({"status": f"Model '{name}' unloaded"})

    def invoke(self, name: str) -> Response:
        """A request for a model."""
        return self._relay(name, "/invocations")

    def pass_on(self, name: str, rest: str) -> Response:
        """Any other path of a model's container."""
        return self._relay(name, f"/{rest}")

    def pass_by_header(self, rest: str = "") -> Response:
        """A path as it is, for the model that the header names, or for the only one."""
        return self._relay(
            request.headers.get(_TARGET) or self._models.the_only_one(), request.path
        )

    def _relay(self, name: str, path: str) -> Response:
        query = quote(request.query_string, safe=f"{_SAFE}?%")
        target = quote(path, safe=_SAFE) + (f"?{query}" if query else "")
        return relay(self._models.ready(name).socket, target)
