"""One measurement under way: what is still to send, and what has come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gevent.event import Event

from loadtest.ask import Ask
from loadtest.clients.schema import Schema
from loadtest.clients.transport import SendError, Transport
from loadtest.record import Attempt, Record

Connect = Callable[[], Transport]


class Session:
    """Shared by the users of one run. Works in greenlets, so nothing needs a lock."""

    def __init__(
        self,
        asks: Iterable[Ask],
        connect: Connect,
        schema: Schema,
        *,
        name: str = "",
    ) -> None:
        """name: of the workload, for locust's own statistics."""
        self.name = name
        self.connect = connect
        self.records: list[Record] = []
        self.on_record: Callable[[Record], None] = lambda record: None
        """Called with each record as it is made."""
        self.gaps_s: list[float] = []
        """Between two arrivals of tokens, over all good requests."""
        self.finished = Event()
        """Set once all that was to send has a record."""
        self._asks = iter(asks)
        self._schema = schema
        self._num_open = 0
        self._start = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def take(self) -> Ask | None:
        """The next to send; None if there is none left. Each one taken must be sent."""
        ask = next(self._asks, None)
        if ask is not None:
            self._num_open += 1
        elif not self._num_open:
            self.finished.set()
        return ask

    def send(self, transport: Transport, ask: Ask) -> Record:
        """Sends it and reads the whole answer; failures are part of the record."""
        attempt, error = Attempt(ask, self.now_s), None
        try:
            for at, line in transport.lines(self._schema.path, self._schema.body(ask)):
                self._schema.read(line, at - self._start, attempt)
        except SendError as failure:
            error = str(failure)
            transport.close()
        record = attempt.record(self.now_s, error)
        self.records.append(record)
        if record.is_good:
            self.gaps_s += attempt.gaps_s
        self._num_open -= 1
        self.on_record(record)
        return record

    def forget(self) -> None:
        """Drops what was kept so far, where nobody will read it."""
        self.records.clear()
        self.gaps_s.clear()
