"""A fake OpenTelemetry collector: an HTTP server in a thread that decodes the spans it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True, slots=True)
class Received:
    """A span as it arrived. Ids are in hexadecimal, times in seconds since 1970."""

    name: str
    trace_id: str
    id: str
    parent_id: str
    trace_state: str
    kind: str
    start: float
    end: float
    attributes: dict[str, object]
    is_error: bool
    message: str
    resource: dict[str, object]


class FakeCollector:
    """Keeps the spans in the order of their arrival."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/traces"
        self.spans: list[Received] = []

    def add(self, data: bytes) -> None:
        """Decode the body of an export request, and keep its spans."""
        for group in ExportTraceServiceRequest.FromString(data).resource_spans:
            resource = _attributes(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_received(span, resource) for span in scope.spans]

    def trees(self) -> dict[str, list[Received]]:
        """Return the spans of each request, by the request's path.

        The request's own span is the first. Its children follow in the order of their start.
        """
        found: dict[str, list[Received]] = {}
        for root in (span for span in self.spans if span.kind == "SPAN_KIND_SERVER"):
            children = [span for span in self.spans if span.parent_id == root.id]
            tree = [root, *sorted(children, key=lambda span: span.start)]
            found[str(root.attributes["url.path"])] = tree
        return found


@contextmanager
def collecting() -> Iterator[FakeCollector]:
    """Run a collector at a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            collector.add(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = FakeCollector(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield collector
        server.shutdown()
        thread.join()


def _received(span: Span, resource: dict[str, object]) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        kind=Span.SpanKind.Name(span.kind),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        message=span.status.message,
        resource=resource,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, str(kind))
