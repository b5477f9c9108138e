"""Locust's user: sends what its session hands out, and tells locust what became of it."""

from __future__ import annotations

import gevent
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.ask import Ask
from loadtest.clients.transport import SendError
from loadtest.record import Record
from loadtest.session import Session


class SessionEnvironment(Environment):
    """An environment whose users share a session."""

    session: Session


class LoadUser(User):
    """One of many at once. Ends when there is nothing left to send.

    Locust times a request until its headers; what counts here are tokens, so every request makes
    three entries of locust's statistics: the whole of it, its first token, its longest stall.
    """

    environment: SessionEnvironment

    def on_start(self) -> None:
        self._transport = self.environment.session.connect()

    def on_stop(self) -> None:
        self._transport.close()

    @task
    def send_next(self) -> None:
        session = self.environment.session
        ask = session.take()
        if ask is None:
            raise StopUser
        if ask.due_s is not None:
            gevent.sleep(max(0.0, ask.due_s - session.now_s))
        self._report(ask, session.send(self._transport, ask))

    def _report(self, ask: Ask, record: Record) -> None:
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
