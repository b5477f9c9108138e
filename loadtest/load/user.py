"""A locust user that sends the requests of a session and reports their outcome to locust."""

from __future__ import annotations

import gevent
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.load.record import Record
from loadtest.load.request import Request
from loadtest.load.session import Session
from loadtest.servers.clients.transport import SendError


class SessionEnvironment(Environment):
    """An environment whose users share a session."""

    session: Session


class LoadUser(User):
    """A concurrent user. Stops when the session has no requests left.

    Locust's own timing of a request ends at the response headers, before the first token. So
    this class reports the time of the whole request, and adds two rows to the statistics, for the
    first token and the longest stall. These rows do not count as requests: locust's totals and
    charts count each request once.
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
        self.environment.events.request.fire(
            request_type="request",
            name=name,
            response_time=1000 * record.latency_s,
            response_length=record.output_tokens or 0,
            exception=SendError(record.error) if record.error else None,
            context={},
        )
        for kind, seconds in (("first token", record.first_token_s), ("stall", record.stall_s)):
            if record.is_good and seconds is not None:
                # The event above would count this time as a request of its own.
                self.environment.stats.entries[name, kind].log(round(1000 * seconds), 0)
