"""A locust user that sends the requests of a session and reports their outcome to locust."""

from __future__ import annotations

import gevent
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.clients.transport import SendError
from loadtest.record import Record
from loadtest.request import Request
from loadtest.session import Session


class SessionEnvironment(Environment):
    """An environment whose users share a session."""

    session: Session


class LoadUser(User):
    """A concurrent user. Stops when the session has no requests left.

    Locust's own timing of a request ends at the response headers, before the first token. Every
    request therefore adds three entries to locust's statistics: the whole request, its first
    token and its longest stall.
    """

    environment: SessionEnvironment

    def on_start(self) -> None:
        self._transport = self.environment.session.connect()

    def on_stop(self) -> None:
        self._transport.close()

    @task
    def send_next(self) -> None:
        session = self.environment.session
        request = session.take()
        if request is None:
            raise StopUser
        if request.due_s is not None:
            gevent.sleep(max(0.0, request.due_s - session.now_s))
        self._report(request, session.send(self._transport, request))

    def _report(self, request: Request, record: Record) -> None:
        name = self.environment.session.name
        error = SendError(record.error) if record.error else None
        self._fire("request", name, record.latency_s, record.output_tokens or 0, error)
        for kind, seconds in (("first token", record.first_token_s), ("stall", record.stall_s)):
            if record.is_good and seconds is not None:
                self._fire(kind, name, seconds, 0, None)

    def _fire(
        self, kind: str, name: str, seconds: float, num_tokens: int, error: Exception | None
    ) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=1000 * seconds,
            response_length=num_tokens,
            exception=error,
            context={},
        )
