"""The spans of requests, as a collector gets them. A dead collector must not disturb requests."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import gevent
import pytest
from flask import Flask
from flask.testing import FlaskClient
from gevent.event import Event
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from container.front_end.app import create_app
from container.http.failures import register_failures
from container.http.headers import register_headers
from container.isolation.helper import Helper
from container.tracing import endpoint as endpoints
from container.tracing import sender
from container.tracing.endpoint import check_traces_endpoint
from container.tracing.sender import BATCH_SPANS, MAX_WAITING_SPANS, SpanSender
from container.tracing.tracing import Tracing
from container.wire.engine_client import EngineClient
from core.configuration.options import ServerOptions, make_options
from core.errors import ConfigurationError
from core.output import Output
from core.protocol.messages import Step, Submit, Variant
from core.protocol.stats import Timing
from core.sampling import Finish
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer
from tests.container.fake_collector import FakeCollector, Received, collecting
from tests.container.fake_engine import Answer, FakeEngine, Script, fails, stalls
from tests.container.http.test_frontend import write_launch
from tests.container.invocations import invoke, stream
from tests.container.processes import HANG_S, ROOT, Caller, free_port, running, wait_until
from tests.escaping import PanicException

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # pragma: allowlist secret
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
PHASES = ["queue", "prefill", "decode"]


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    with collecting() as collector:
        yield collector


class Traced:
    """An application that is traced, and the spans that it has sent."""

    def __init__(self, http: FlaskClient, tracing: Tracing, collector: FakeCollector) -> None:
        self.http = http
        self._tracing = tracing
        self._collector = collector

    def spans(self, path: str = "/invocations") -> list[Received]:
        """Send what is left, and return the spans of the last request to a path."""
        self._tracing.close()
        return self._collector.trees()[path]


@pytest.fixture
def predict_timeout() -> int:
    return 60


@pytest.fixture
def traced(
    client: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    helper: Helper,
    collector: FakeCollector,
    predict_timeout: int,
) -> Iterator[Traced]:
    tracing = Tracing(collector.url)
    options = make_options({"enable_lora": True, "predict_timeout": predict_timeout})
    app = create_app(client, tokenizer, options, "demo", template, helper=helper, tracing=tracing)
    yield Traced(app.test_client(), tracing, collector)
    tracing.close()


def create_plain_app(tracing: Tracing) -> FlaskClient:
    """Return a client of an application without a model."""
    app = Flask("test")
    register_headers(app)
    register_failures(app)
    tracing.add_to(app, "demo")
    return app.test_client()


def timed(timings: list[Timing], *, seconds: float = 0.05) -> Script:
    """A script that answers with two tokens. Each phase lasts `seconds`.

    It adds the times of the phases to `timings`.
    """

    def script(submit: Submit) -> Answer:
        arrived = time.monotonic()
        time.sleep(seconds)
        admitted = time.monotonic()
        time.sleep(seconds)
        first_token = time.monotonic()
        yield Step([(submit.id, Output(0, (65,), (-0.5,), admitted=admitted))])
        time.sleep(seconds)
        timing = Timing(arrived, admitted, first_token, time.monotonic())
        timings.append(timing)
        last = Output(0, (66,), (-0.5,), Finish.LENGTH, admitted=admitted, timing=timing)
        yield Step([(submit.id, last)])

    return script


def end(response: Any) -> None:
    """Read the whole response and close it, as a server does."""
    response.get_data()
    response.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_is_a_span_with_its_phases_below(
    traced: Traced, engine: FakeEngine, streamed: bool
) -> None:
    timings: list[Timing] = []
    engine.script = timed(timings)
    began = time.time()
    body = {"inputs": "Q", "parameters": {"max_new_tokens": 2}, "stream": streamed}
    end(traced.http.post("/invocations", json=body, headers=SAMPLED))
    ended = time.time()
    request, *phases = traced.spans()

    assert (request.trace_id, request.parent_id) == (TRACE, PARENT)
    assert request.trace_state == "vendor=1"
    assert (request.name, request.kind) == ("POST /invocations", "SPAN_KIND_SERVER")
    assert [phase.name for phase in phases] == PHASES
    assert {phase.trace_id for phase in phases} == {TRACE}

    (timing,) = timings
    spans_s = [phase.end - phase.start for phase in phases]
    expected = [
        timing.admitted - timing.arrived,
        timing.first_token - timing.admitted,
        timing.finished - timing.first_token,
    ]
    assert spans_s == pytest.approx(expected, abs=1e-5)
    times = [began, request.start, phases[0].start, phases[2].end, request.end, ended]
    assert times == sorted(times)
    assert [phase.end for phase in phases[:2]] == [phase.start for phase in phases[1:]]


def test_attributes_have_opentelemetrys_names(traced: Traced, engine: FakeEngine) -> None:
    engine.script = timed([], seconds=0)
    parameters = {"max_new_tokens": 2, "do_sample": True, "temperature": 0.5, "top_p": 0.75}
    response = invoke(traced.http, "Q", **parameters)
    end(response)
    request, *_ = traced.spans()
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/invocations",
        "http.response.status_code": 200,
        "url.path": "/invocations",
        "url.scheme": "http",
        "gen_ai.request.id": response.headers["X-Request-Id"],
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "longshore",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.n": 1,
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert (request.is_error, request.parent_id) == (False, "")
    assert request.resource["service.name"] == "longshore"


def test_a_chat_with_an_adapter(traced: Traced, engine: FakeEngine) -> None:
    engine.adapters["poet"] = Variant("poet", "/poet")
    messages = [{"role": "user", "content": "Q"}]
    end(traced.http.post("/v1/chat/completions", json={"messages": messages, "model": "poet"}))
    request, *_ = traced.spans("/v1/chat/completions")
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.request.model"] == "poet"
    assert request.attributes["gen_ai.response.finish_reasons"] == ["stop"]


def test_the_environment_names_the_service(
    monkeypatch: pytest.MonkeyPatch, collector: FakeCollector
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = Tracing(collector.url)
    app = create_plain_app(tracing)
    end(app.get("/nowhere"))
    tracing.close()
    ((request, *_),) = collector.trees().values()
    assert request.resource["service.name"] == "mine"


def test_phases_of_an_answer_that_a_stop_string_ends(
    traced: Traced, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """The engine sends no `timing` for such an answer.

    It sends only the time at which it admitted the request. The worker measures the others.
    """
    admitted: list[float] = []

    def script(submit: Submit) -> Answer:
        admitted.append(time.monotonic())
        for token_id in tokenizer.encode("Hi there"):
            yield Step([(submit.id, Output(0, (token_id,), (-0.5,), admitted=admitted[0]))])

    engine.script = script
    end(invoke(traced.http, stop=["t"]))
    request, *phases = traced.spans()
    assert [phase.name for phase in phases] == PHASES
    times = [request.start, *(phase.start for phase in phases), phases[2].end, request.end]
    assert times == sorted(times)
    assert request.attributes["gen_ai.response.finish_reasons"] == ["stop"]


def test_the_clients_sampling_decision_counts(traced: Traced, collector: FakeCollector) -> None:
    ignored = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    end(traced.http.post("/invocations", json={"inputs": "Q"}, headers=ignored))
    end(traced.http.get("/v1/models", headers={"traceparent": "nonsense"}))
    (models,) = traced.spans("/v1/models")
    assert models.parent_id == ""
    assert list(collector.trees()) == ["/v1/models"]


def test_monitors_are_not_traced(traced: Traced, collector: FakeCollector) -> None:
    for path in ("/ping", "/health", "/metrics", "/nowhere"):
        end(traced.http.get(path))
    (missing,) = traced.spans("/nowhere")
    assert (missing.name, missing.is_error) == ("GET", True)
    assert list(collector.trees()) == ["/nowhere"]


def test_refusals_are_errors(traced: Traced) -> None:
    end(invoke(traced.http, max_new_tokens=-1))
    (request,) = traced.spans()
    assert (request.is_error, request.attributes["error.type"]) == (True, "400")
    assert "parameters.max_new_tokens" in request.message
    assert request.attributes["http.response.status_code"] == 400
    assert "gen_ai.operation.name" not in request.attributes


def test_a_stream_that_fails_is_an_error_with_status_200(
    traced: Traced, engine: FakeEngine
) -> None:
    engine.script = fails("failed", "no luck", after=[65])
    end(stream(traced.http))
    request, *_ = traced.spans()
    assert request.attributes["http.response.status_code"] == 200
    assert (request.is_error, request.attributes["error.type"]) == (True, "424")
    assert request.message == "no luck"


@pytest.mark.parametrize("predict_timeout", [1])
def test_a_request_that_never_leaves_the_queue(traced: Traced, engine: FakeEngine) -> None:
    engine.script = stalls()
    end(invoke(traced.http))
    request, *phases = traced.spans()
    assert (request.is_error, request.attributes["error.type"]) == (True, "424")
    (queue,) = phases
    assert queue.name == "queue"
    assert request.start <= queue.start < queue.end <= request.end


def test_a_client_that_leaves_is_an_error(traced: Traced, engine: FakeEngine) -> None:
    engine.script = stalls(after=[65])
    response = stream(traced.http)
    assert next(iter(response.response))
    response.close()
    request, *_ = traced.spans()
    assert (request.is_error, request.attributes["error.type"]) == (True, "499")


def test_a_dead_collector_only_loses_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    tracing = Tracing(f"http://127.0.0.1:{free_port()}/v1/traces")
    http = create_plain_app(tracing)
    for _ in range(3):
        end(http.get("/nowhere"))
    tracing.close()
    lost = [record for record in caplog.records if record.name == sender.__name__]
    assert [record.getMessage() for record in lost] == ["event=spans_lost total=3"]


class SlowExporter(SpanExporter):
    """Keeps the sizes of batches. It accepts no batch until the test allows it."""

    def __init__(self) -> None:
        self.may_export = Event()
        self.sizes: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_export.wait()
        self.sizes.append(len(spans))
        return SpanExportResult.SUCCESS


def test_waiting_spans_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    exporter = SlowExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpanSender(exporter))
    tracer = provider.get_tracer("test")
    for _ in range(BATCH_SPANS):
        tracer.start_span("first").end()
    gevent.sleep(0)
    gevent.sleep(0)  # the sender has taken a batch and waits for the exporter
    for _ in range(MAX_WAITING_SPANS + 5):
        tracer.start_span("later").end()
    assert caplog.messages[-1] == "event=spans_lost total=5"
    exporter.may_export.set()
    provider.shutdown()
    assert sum(exporter.sizes) == BATCH_SPANS + MAX_WAITING_SPANS
    assert max(exporter.sizes) == BATCH_SPANS


class PanickingExporter(SpanExporter):
    """Panics at the first batch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.sizes.append(len(spans))
        if len(self.sizes) == 1:
            raise PanicException("why")
        return SpanExportResult.SUCCESS


def test_a_panic_of_the_exporter_loses_only_its_spans(caplog: pytest.LogCaptureFixture) -> None:
    exporter = PanickingExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpanSender(exporter))
    tracer = provider.get_tracer("test")
    for _ in range(BATCH_SPANS + 3):
        tracer.start_span("span").end()
    provider.shutdown()
    assert exporter.sizes == [BATCH_SPANS, 3]
    assert caplog.messages[-1] == f"event=spans_lost total={BATCH_SPANS}"


def test_messages_repeat_once_a_minute() -> None:
    repeats = sender.RepeatFilter()

    def passes(message: str, second: float) -> bool:
        record = logging.LogRecord("", logging.WARNING, "", 0, message, None, None)
        record.created = second
        return repeats.filter(record)

    assert [passes("a", 0), passes("a", 59), passes("b", 59), passes("a", 60)] == [
        True, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://localhost:4317", "http://", "collector",
                                 "http://[::1:4318"])  # fmt: skip
def test_the_endpoint_is_a_url_of_http(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"otlp_traces_endpoint=.* over HTTP"):
        check_traces_endpoint(ServerOptions(otlp_traces_endpoint=url))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    options = ServerOptions(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    check_traces_endpoint(options)
    monkeypatch.setattr(endpoints, "distribution", missing)
    with pytest.raises(ConfigurationError, match=r"^VARIABLE: .*pip install 'longshore\[otel\]'"):
        check_traces_endpoint(options, "VARIABLE")
    check_traces_endpoint(ServerOptions())


def test_opentelemetry_is_not_imported_without_the_option() -> None:
    code = (
        "import sys, container.front_end.app, container.front_end.worker, "
        "container.front_end.start, container.launch.supervisor, container.launch.preparation; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_worker_sends_its_last_spans_when_it_stops(
    tmp_path: Path,
    tokenizer_dir: Path,
    engine: FakeEngine,
    endpoint: str,
    collector: FakeCollector,
    is_alive: bool,
) -> None:
    """The regex makes the worker start its helper process, while greenlets send spans."""
    caller = Caller(free_port())
    url = collector.url if is_alive else f"http://127.0.0.1:{free_port()}/v1/traces"
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port, otlp_traces_endpoint=url)
    body = {"inputs": "Q", "parameters": {"structured_outputs": {"regex": "a"}}}
    with running(["-m", "container.front_end.start", str(os.getpid()), str(launch)]) as process:
        wait_until(caller.is_healthy)
        assert [caller.post(body)[0] for _ in range(3)] == [200] * 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        _, errors = process.communicate()
    requests = [span for span in collector.spans if span.kind == "SPAN_KIND_SERVER"]
    assert len(requests) == (3 if is_alive else 0)
    assert ("spans_lost" in errors) == (not is_alive), errors
