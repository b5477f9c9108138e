"""State of a run in progress: the requests still to send and the records so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from gevent.event import Event

from loadtest.load.record import Attempt, Record
from loadtest.load.request import Request
from loadtest.servers.clients.schema import Schema
from loadtest.servers.clients.transport import SendError, Transport

Connect = Callable[[], Transport]


class Session:
    """Hands out the requests of one run to its users and collects their records.

    All users are greenlets of one thread, so nothing needs a lock.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        connect: Connect,
        schema: Schema,
        *,
        name: str = "",
        stop_s: float | None = None,
    ) -> None:
        """name: workload name in locust's statistics. stop_s: until when to hand out requests."""
        self.name = name
        self.connect = connect
        self.records: list[Record] = []
        self.on_record: Callable[[Record], None] = lambda record: None
        """Called with each new record."""
        self.gaps_s: list[float] = []
        """Inter-token gaps in seconds, over all successful requests."""
        self.finished = Event()
        """Set once every request handed out has a record and no more will be handed out."""
        self._requests = iter(requests)
        self._stop_s = math.inf if stop_s is None else stop_s
        self._schema = schema
        self._num_open = 0
        self._start = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the session was created."""
        return time.perf_counter() - self._start

    def take(self) -> Request | None:
        """Return the next request, or None if the session ends. The caller must send it."""
        request = next(self._requests, None) if self.now_s < self._stop_s else None
        if request is not None:
            self._num_open += 1
        elif not self._num_open:
            self.finished.set()
        return request

    def send(self, transport: Transport, request: Request) -> Record:
        """Send a request and read the whole response. Failures go into the record."""
        attempt, error = Attempt(request, self.now_s), None
        try:
            for at, line in transport.lines(self._schema.path, self._schema.body(request)):
                self._schema.read(line, at - self._start, attempt)
        except SendError as failure:
            error = str(failure)
            transport.close()
        record = attempt.finish(self.now_s, error)
        self.records.append(record)
        if record.is_good:
            self.gaps_s += attempt.gaps_s
        self._num_open -= 1
        self.on_record(record)
        return record

    def forget(self) -> None:
        """Drop all records and gaps so far."""
        self.records.clear()
        self.gaps_s.clear()
