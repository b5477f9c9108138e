"""Sends ended spans to the collector, in batches, from a greenlet of the worker."""

from __future__ import annotations

import logging
from collections import deque

import gevent
from gevent.event import Event
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from core.foreign_code import contained

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
BATCH_SPANS = 64
"""Encoding a batch holds up the worker's event loop for about 1.5 ms."""
MAX_WAITING_SPANS = 2048
"""The most spans that wait to be sent. Further spans are dropped."""
FLUSH_S = 1.0
"""Time to send the remaining spans when the worker stops."""
REPEAT_S = 60.0


class RepeatFilter(logging.Filter):
    """Passes each message once per `REPEAT_S`.

    If the collector is dead, several messages are logged for each batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created < self._logged_at.get(record.msg, -REPEAT_S) + REPEAT_S:
            return False
        self._logged_at[record.msg] = record.created
        return True


class SpanSender(SpanProcessor):
    """A span processor that replaces OpenTelemetry's own.

    If the collector cannot be reached, OpenTelemetry's own processor would retry for many seconds
    while the worker stops.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._waiting: deque[ReadableSpan] = deque()
        self._num_lost = 0
        self._is_closing = False
        self._wake = Event()
        self._greenlet: gevent.Greenlet[[], None] = gevent.spawn(self._send_forever)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span. Called by OpenTelemetry."""
        if self._is_closing or len(self._waiting) >= MAX_WAITING_SPANS:
            self._lose(1)
            return
        self._waiting.append(span)
        if len(self._waiting) >= BATCH_SPANS:
            self._wake.set()

    def shutdown(self) -> None:
        """Send the remaining spans, for at most `FLUSH_S`. May be called again."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake.set()
        self._greenlet.join(FLUSH_S)
        self._greenlet.kill()
        self._exporter.shutdown()
        if self._waiting:
            self._lose(len(self._waiting))

    def _send_forever(self) -> None:
        while self._waiting or not self._is_closing:
            self._wake.wait(INTERVAL_S)
            size = min(len(self._waiting), BATCH_SPANS)
            if size:
                self._send([self._waiting.popleft() for _ in range(size)])
            # `_wake` stays set if the next batch is already full or the worker is stopping. That
            # batch is then sent at once.
            if len(self._waiting) < BATCH_SPANS and not self._is_closing:
                self._wake.clear()

    def _send(self, batch: list[ReadableSpan]) -> None:
        result = SpanExportResult.FAILURE
        try:
            with contained:
                result = self._exporter.export(batch)
        except Exception:
            logger.exception("event=export_failed")
        finally:  # also if this greenlet is killed
            if result is not SpanExportResult.SUCCESS:
                self._lose(len(batch))

    def _lose(self, num_spans: int) -> None:
        self._num_lost += num_spans
        logger.warning("event=spans_lost total=%d", self._num_lost)
