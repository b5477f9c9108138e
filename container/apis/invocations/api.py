"""SageMaker's and DJL Serving's routes, which are the same for every task."""

from __future__ import annotations

from flask import Response

from container.apis.invocations.routing import routed_answer
from container.apis.invocations.sessions import session_answer
from container.http.failures import Failure, failure_response
from container.http.health import HEALTH_PATHS
from container.http.metrics import MIMETYPE as METRICS_MIMETYPE
from container.http.metrics import metrics_text
from container.http.request_context import request_context
from container.http.route import ALL_KINDS, Api, get, post
from container.http.service import Service, json_response


def ping(service: Service) -> Response:
    """Return 200 if an engine is healthy, else 503."""
    health = service.client.health()
    if not health.healthy:
        return failure_response(Failure(503, health.reason))
    return json_response({"status": "healthy"})


def metrics(service: Service) -> Response:
    """Return the engines' metrics for Prometheus; 503 while no engine is ready."""
    text = metrics_text(service.client, service.model_name, service.options)
    return Response(text, content_type=METRICS_MIMETYPE)


def invoke(service: Service, accept_header: str = "Accept") -> Response:
    """Answer a request.

    A request that names another path is answered there. A request that only opens or closes a
    session is answered here, and the container's `Invocation` answers all others.

    accept_header: as in `request_context`.
    """
    context = request_context(accept_header)
    routed = routed_answer(context.headers)
    if routed is not None:
        return routed
    invocation = service.contract.invocation
    body = invocation.read(service, context)
    answer = session_answer(service.options.server, context, body)
    return answer or invocation.answer(service, context, body)


def predict(service: Service, model: str) -> Response:
    """Answer a request on one of DJL Serving's paths, which name the model."""
    service.require_model(model)
    return invoke(service)


_NAMED = "The same as /invocations, with the model's name in the path."
HEALTH = Api(
    "SageMaker, Kubernetes",
    (
        *(get(path, "Return 200 if the engine is healthy.", ping) for path in HEALTH_PATHS),
        post("/ping", "", ping),
    ),
    kinds=ALL_KINDS,
)  # fmt: skip
METRICS = Api(
    "Prometheus",
    (
        get("/metrics", "Return the engine's metrics in Prometheus' text format.", metrics),
    ),
    kinds=ALL_KINDS,
)  # fmt: skip
INVOCATIONS = Api(
    "SageMaker",
    (
        post("/invocations", "Answer one request or a batch.", invoke, takes_invocation=True),
    ),
    kinds=ALL_KINDS,
)  # fmt: skip
PREDICTIONS = Api(
    "DJL Serving",
    (
        post("/predictions/<model>", _NAMED, predict, takes_invocation=True),
        post("/models/<model>/invoke", _NAMED, predict, takes_invocation=True),
    ),
    kinds=ALL_KINDS,
)  # fmt: skip
