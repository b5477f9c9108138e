"""The WSGI application in front of several models."""

from __future__ import annotations

from urllib.parse import quote

from flask import Flask, Response, request

from container.apis.model_routes import (
    LOAD_FIELDS,
    list_models,
    read_load_request,
    read_page_request,
)
from container.apis.openapi import openapi_document
from container.apis.table import error_body
from container.apis.tasks.handler import INVOCATION
from container.http.cors import register_cors
from container.http.failures import Failure, failure_response, register_failures
from container.http.headers import register_headers
from container.http.health import HEALTH_PATHS
from container.http.metrics import MIMETYPE as METRICS_MIMETYPE
from container.http.route import Api, Body, Contract, delete, get, post
from container.http.service import json_response
from container.multi_model.metrics import merge_metrics
from container.multi_model.model import RefusedError
from container.multi_model.model_registry import ModelRegistry
from container.multi_model.relay import relay
from container.schema.body import read_json
from container.security.authentication import Gate
from container.security.source_roots import SourceRoots
from container.ui.routes import KEYLESS_ENDPOINTS, Page

MAX_BODY_BYTES = 2**16
"""Limit for requests to this application itself; each model's container has its own limit."""
_TARGET = "X-Amzn-SageMaker-Target-Model"
_EXAMPLE = '{"model_name": "...", "url": "..."}'
_SAFE_CHARACTERS = "/:@!$&'()*+,;=~"
"""Characters that need no quoting in a path, in addition to letters and digits."""
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_MODEL_PATHS = (
    "/endpoints/<path:rest>",
    "/v1/<path:rest>",
    "/openai/v1/<path:rest>",
    "/v2/rerank",
    "/rerank",
    "/score",
    "/embed",
    "/embed_sparse",
    "/predict",
    "/tokenize",
    "/detokenize",
    "/generate",
    "/generate_stream",
    "/info",
    "/load",
    "/version",
)
"""Paths of a single-model container; a header names the model. All other paths of a model begin
with `/models/NAME` or `/predictions/NAME`."""


def create_front(
    models: ModelRegistry,
    gate: Gate | None = None,
    sources: SourceRoots | None = None,
    cors_allowed_origin: str | None = None,
    page: Page | None = None,
) -> Flask:
    """Create the app: SageMaker's multi-model routes, and routes forwarded to the models.

    gate: checks API keys; each model's container applies their rate limits. sources: where models
    may be loaded from, by default SageMaker's directory. page: the live page, which shows the
    models that generate text.
    """
    app = Flask("longshore", static_folder=None)
    routes = Routes(models, sources or SourceRoots())
    routes.add_to(app)
    if page is not None:
        routes.add_page_to(app, page)
    register_headers(app)
    if cors_allowed_origin is not None:
        register_cors(app, cors_allowed_origin)
    if gate is not None:
        gate.add_to(app, KEYLESS_ENDPOINTS)
    register_failures(app, error_body)
    app.register_error_handler(RefusedError, _refusal_response)
    return app


def _refusal_response(error: RefusedError) -> Response:
    return failure_response(Failure(error.code, str(error), error.field))


class Routes:
    """The routes of the multi-model app."""

    def __init__(self, models: ModelRegistry, sources: SourceRoots) -> None:
        self._models = models
        self._sources = sources

    def add_to(self, app: Flask) -> None:
        FRONT.add_to(app, self)
        app.add_url_rule("/models/<name>/<path:rest>", view_func=self.forward, methods=_METHODS)
        for path in _MODEL_PATHS:
            app.add_url_rule(path, view_func=self.forward_by_header, methods=_METHODS)

    def add_page_to(self, app: Flask, page: Page) -> None:
        """Add the live page, and routes that forward to the `/ui/` paths of each model.

        Only clients that may see the page may use these routes.
        """

        def watch(name: str, rest: str) -> Response:
            page.check_client()
            return self._relay(name, f"/ui/{rest}")

        page.add_to(app)
        app.add_url_rule("/models/<name>/ui/<path:rest>", view_func=watch)

    def ping(self) -> Response:
        """Answer 200 once the initial models are loaded, else 503."""
        if not self._models.initial_models_loaded:
            return failure_response(Failure(503, "the models are being loaded"))
        return json_response({"status": "healthy"})

    def document(self) -> Response:
        return json_response(openapi_document(CONTRACT))

    def metrics(self) -> Response:
        text = merge_metrics(self._models.sockets())
        return Response(text, content_type=METRICS_MIMETYPE)

    def list(self) -> Response:
        """Return one page of the list of models."""
        page = read_page_request(request.args)
        return json_response(list_models(self._models.statuses(), page))

    def load(self) -> Response:
        """Load a model and respond when it is ready."""
        request.max_content_length = MAX_BODY_BYTES
        body = read_json(request.get_data(), _EXAMPLE)
        load = read_load_request(body)
        self._sources.require(load.url.removeprefix("file://"), "url")
        self._models.load(load.name, load.url)
        return json_response({"status": f"Model '{load.name}' loaded"})

    def describe(self, name: str) -> Response:
        return json_response(self._models.describe(name).description())

    def unload(self, name: str) -> Response:
        """Unload a model and respond when all its processes have ended."""
        self._models.unload(name)
        return json_response({"status": f"Model '{name}' unloaded"})

    def invoke(self, name: str) -> Response:
        """Forward a request to the model's `/invocations`."""
        return self._relay(name, "/invocations")

    def model_document(self, name: str) -> Response:
        """Forward a request for the document of the model's container."""
        return self._relay(name, "/openapi.json")

    def forward(self, name: str, rest: str) -> Response:
        """Forward a request to any other path of the model's container."""
        return self._relay(name, f"/{rest}")

    def forward_by_header(self, rest: str = "") -> Response:
        """Forward the path to the model that the header names or, without it, to the only model."""
        return self._relay(
            request.headers.get(_TARGET) or self._models.only_model_name(), request.path
        )

    def _relay(self, name: str, path: str) -> Response:
        query = quote(request.query_string, safe=f"{_SAFE_CHARACTERS}?%")
        target = quote(path, safe=_SAFE_CHARACTERS) + (f"?{query}" if query else "")
        return relay(self._models.ready(name).socket, target)


_INVOKE = "Send a request to the model's /invocations."
FRONT = Api(
    "SageMaker",
    (
        *(get(path, "Return 200 once all models of the store are loaded.", Routes.ping)
          for path in HEALTH_PATHS),
        post("/ping", "", Routes.ping),
        get("/models", "List the models by name, page by page (limit, next_page_token).",
            Routes.list),
        post("/models", "Load a model. The response is sent once the model is ready.", Routes.load,
             Body("Load", LOAD_FIELDS, tuple(LOAD_FIELDS)),
             responses={507: "There is not enough memory. Unload another model first."}),
        get("/models/<name>", "Describe a model.", Routes.describe),
        delete("/models/<name>", "Unload a model. The response is sent once its memory is free.",
               Routes.unload),
        post("/models/<name>/invoke", _INVOKE, Routes.invoke, takes_invocation=True),
        get("/models/<name>/openapi.json",
            "Return the model's own document. Its paths are below /models/NAME.",
            Routes.model_document),
        post("/predictions/<name>", _INVOKE, Routes.invoke, takes_invocation=True),
        post("/invocations",
             f"Send a request to the model that {_TARGET} names, or to the only one.",
             Routes.forward_by_header, takes_invocation=True),
        get("/metrics", "Return the metrics of all engines in Prometheus' text format.",
            Routes.metrics),
        get("/openapi.json", "Return the OpenAPI document.", Routes.document),
    ),
)  # fmt: skip
CONTRACT = Contract((FRONT,), INVOCATION)
"""Any body is allowed, as for a handler: only the model's own container knows the fields."""
