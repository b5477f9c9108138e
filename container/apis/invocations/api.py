"""SageMaker's and DJL Serving's routes, which are the same for every task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flask import Flask, Response

from container.apis.invocations.routing import routed_answer
from container.apis.invocations.sessions import SessionRequests
from container.http.failures import Failure, failure_response
from container.http.health import HEALTH_PATHS
from container.http.metrics import MIMETYPE as METRICS_MIMETYPE
from container.http.metrics import metrics_text
from container.http.request_context import RequestContext, request_context
from container.http.service import Service, json_response


class Api(Protocol):
    """Answers the requests to /invocations for one kind of task."""

    def read(self, context: RequestContext) -> Mapping[str, object]:
        """Return the fields of the request's body; none if the API takes the body unparsed."""
        ...

    def answer(self, context: RequestContext, body: Mapping[str, object]) -> Response:
        """Return the response to a body that `read` returned."""
        ...


class Invocations:
    """/invocations and its aliases, /ping and its aliases, and /metrics."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service = service
        self._api = api
        self._sessions = SessionRequests(service.options)

    def add_to(self, app: Flask) -> None:
        app.add_url_rule("/ping", view_func=self.ping, methods=["GET", "POST"])
        for path in set(HEALTH_PATHS) - {"/ping"}:
            app.add_url_rule(path, view_func=self.ping)
        app.add_url_rule("/metrics", view_func=self.metrics)
        app.add_url_rule("/invocations", view_func=self.invoke, methods=["POST"])
        for path in ("/predictions/<model>", "/models/<model>/invoke"):
            app.add_url_rule(path, view_func=self.predict, methods=["POST"])

    def ping(self) -> Response:
        """Return 200 if an engine is healthy, else 503."""
        health = self._service.client.health()
        if not health.healthy:
            return failure_response(Failure(503, health.reason))
        return json_response({"status": "healthy"})

    def metrics(self) -> Response:
        """Return the engines' metrics for Prometheus; 503 while no engine is ready."""
        text = metrics_text(self._service.client, self._service.model_name, self._service.options)
        return Response(text, content_type=METRICS_MIMETYPE)

    def predict(self, model: str) -> Response:
        """Answer a request on one of DJL Serving's paths, which name the model."""
        self._service.require_model(model)
        return self.invoke()

    def invoke(self, accept_header: str = "Accept") -> Response:
        """Answer a request.

        A request that names another path is answered there. A request that only opens or closes a
        session is answered here, and the API answers all others.

        accept_header: as in `request_context`.
        """
        context = request_context(accept_header)
        routed = routed_answer(context.headers)
        if routed is not None:
            return routed
        body = self._api.read(context)
        return self._sessions.answer(context, body) or self._api.answer(context, body)
