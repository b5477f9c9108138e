"""The tracer of one front-end worker (option.otlp_traces_endpoint)."""

from __future__ import annotations

import logging
from importlib.metadata import version

from flask import Flask, Response, g, request
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider

from container.http.request_log import MONITORING_PATHS
from container.http.request_record import RequestRecord
from container.tracing import sender
from container.tracing.request_spans import CONTEXT_HEADERS, HttpExchange, write_spans


class Tracing:
    """Writes the spans of an application's requests and sends them to a collector.

    Create it after the fork: its greenlet belongs to the event loop of its process.
    OpenTelemetry's environment variables apply, such as OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and
    OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, endpoint: str) -> None:
        """endpoint: the URL to which batches of spans are posted."""
        exporter = OTLPSpanExporter(endpoint)
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(sender.SpanSender(exporter))
        self._tracer = self._provider.get_tracer("longshore")
        self._repeats = sender.RepeatFilter()
        for logger in _loggers():
            logger.addFilter(self._repeats)

    def add_to(self, app: Flask, model_name: str) -> None:
        """Trace every request to the app, except the requests of monitors."""

        def after(response: Response) -> Response:
            if request.path not in MONITORING_PATHS:
                exchange, record = _exchange(response), g.context.record
                response.call_on_close(lambda: self._write(model_name, exchange, record))
            return response

        app.after_request(after)

    def close(self) -> None:
        """Send the spans that are left, for at most `sender.FLUSH_S`."""
        self._provider.shutdown()
        for logger in _loggers():
            logger.removeFilter(self._repeats)

    def _write(self, model_name: str, exchange: HttpExchange, record: RequestRecord) -> None:
        write_spans(self._tracer, model_name, exchange, record)


def _resource() -> Resource:
    """Return the attributes of every span. Environment variables override our own."""
    ours = {"service.name": "longshore", "service.version": version("longshore")}
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def _loggers() -> list[logging.Logger]:
    """Return the loggers that a dead collector would fill with repeated messages."""
    return [logging.getLogger(name) for name in (OTLPSpanExporter.__module__, sender.__name__)]


def _exchange(response: Response) -> HttpExchange:
    """Return the facts about Flask's current request that its spans record."""
    given = ((name, request.headers.get(name)) for name in CONTEXT_HEADERS)
    return HttpExchange(
        id=g.context.id,
        method=request.method,
        scheme=request.scheme,
        path=request.path,
        route=request.url_rule.rule if request.url_rule is not None else None,
        status=response.status_code,
        context={name: value for name, value in given if value is not None},
    )
