"""SageMaker's and DJL Serving's routes: one door, whatever the container serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flask import Flask, Response, abort, request

from container.apis.invocations.sessions import SessionRequests
from container.http.failures import Failure, failure_response
from container.http.host import Host, json_response
from container.http.metrics import MIMETYPE as METRICS_MIMETYPE
from container.http.metrics import metrics_text


class Api(Protocol):
    """What answers the requests that come through the door."""

    def read(self) -> Mapping[str, object]:
        """The fields of the current request's body, as far as it has any."""
        ...

    def answer(self, body: Mapping[str, object], accept: str | None) -> Response:
        """The answer; `accept` is what the client says it takes."""
        ...


class Invocations:
    """The door."""

    def __init__(self, host: Host, api: Api) -> None:
        self._host = host
        self._api = api
        self._sessions = SessionRequests(host.options)

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        app.add_url_rule("/ping", view_func=self.ping, methods=["GET", "POST"])
        app.add_url_rule("/metrics", view_func=self.metrics)
        app.add_url_rule("/invocations", view_func=self.invoke, methods=["POST"])
        for path in ("/predictions/<model>", "/models/<model>/invoke"):
            app.add_url_rule(path, view_func=self.predict, methods=["POST"])

    def ping(self) -> Response:
        """200 while requests would be answered."""
        health = self._host.client.health()
        if not health.healthy:
            return failure_response(Failure(503, health.reason))
        return json_response({"status": "healthy"})

    def metrics(self) -> Response:
        """What the engine is doing, for Prometheus; an error while it is not ready."""
        client = self._host.client
        text = metrics_text(client.facts, client.stats, self._host.model_name)
        return Response(text, content_type=METRICS_MIMETYPE)

    def predict(self, model: str) -> Response:
        """DJL Serving's paths for a model by its name."""
        if model != self._host.model_name:
            abort(404, f"no model '{model}'; this container serves '{self._host.model_name}'")
        return self.invoke()

    def invoke(self) -> Response:
        """SageMaker's path."""
        return self.answer(request.headers.get("Accept"))

    def answer(self, accept: str | None) -> Response:
        """Answers the current request; `accept` is what its client says it takes."""
        body = self._api.read()
        about_session = self._sessions.answer(body)
        return about_session or self._api.answer(body, accept)
