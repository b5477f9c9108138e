"""The spans of one request: the request itself, and within it queue, prefill and decode.

Attributes have the names of OpenTelemetry's semantic conventions for HTTP and for generative AI.
`gen_ai.request.id` and `gen_ai.request.n` are vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from container.http.failures import Failure
from container.http.request_record import RequestRecord

_CONTEXT = TraceContextTextMapPropagator()
CONTEXT_HEADERS = ("traceparent", "tracestate")


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """The facts about an HTTP request and its response that its spans record."""

    id: str
    method: str
    scheme: str
    path: str
    route: str | None
    """The path's pattern; None if there is no such path."""
    status: int
    context: Mapping[str, str]
    """The headers in `CONTEXT_HEADERS` that the request has."""


def write_spans(
    tracer: Tracer, model_name: str, exchange: HttpExchange, record: RequestRecord
) -> None:
    """Write the spans of a request that ends now.

    Nothing is written if the client's context says that its trace is not sampled.
    """
    now = record.now()
    offset_s = time.time() - now

    def nanoseconds(at: float) -> int:
        return int((at + offset_s) * 1e9)

    span = tracer.start_span(
        f"{exchange.method} {exchange.route}" if exchange.route else exchange.method,
        context=_CONTEXT.extract(exchange.context),
        kind=SpanKind.SERVER,
        attributes=dict(_attributes(model_name, exchange, record)),
        start_time=nanoseconds(record.began),
    )
    if not span.is_recording():
        return
    failure = record.failure or Failure(exchange.status, "")
    if failure.code >= 400:
        span.set_attribute("error.type", str(failure.code))
        span.set_status(Status(StatusCode.ERROR, failure.message or None))
    within = set_span_in_context(span)
    for name, start, end in phases(record, now):
        phase = tracer.start_span(name, context=within, start_time=nanoseconds(start))
        phase.end(nanoseconds(end))
    span.end(nanoseconds(now))


def phases(record: RequestRecord, now: float) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each phase that the request reached.

    The times are the engine's if it has sent them for all answers, otherwise this process's own. A
    phase without an end lasted until the engine stopped working on the request.
    """
    timing = record.timing
    if timing is not None:
        times = (timing.arrived, timing.admitted, timing.first_token, timing.finished)
    else:
        ended = record.ended or now
        times = (record.submitted, record.admitted, record.first_token, ended)
    for name, start, end in zip(("queue", "prefill", "decode"), times, times[1:], strict=False):
        if start is None:
            return
        yield name, start, times[3] if end is None else end


def _attributes(
    model_name: str, exchange: HttpExchange, record: RequestRecord
) -> Iterator[tuple[str, AttributeValue]]:
    yield "http.request.method", exchange.method
    yield "http.response.status_code", exchange.status
    yield "url.path", exchange.path
    yield "url.scheme", exchange.scheme
    yield "gen_ai.request.id", exchange.id
    if exchange.route is not None:
        yield "http.route", exchange.route
    if record.operation is None or record.params is None:
        return
    yield "gen_ai.operation.name", record.operation
    yield "gen_ai.provider.name", "longshore"
    yield "gen_ai.request.model", record.variant or model_name
    yield "gen_ai.response.model", record.variant or model_name
    yield "gen_ai.request.max_tokens", record.params.max_tokens
    yield "gen_ai.request.temperature", record.params.temperature
    yield "gen_ai.request.top_p", record.params.top_p
    yield "gen_ai.request.n", record.params.n
    yield "gen_ai.usage.input_tokens", record.prompt_tokens
    yield "gen_ai.usage.output_tokens", record.tokens
    if record.finishes:
        yield "gen_ai.response.finish_reasons", [f.public_name for f in record.finishes]
