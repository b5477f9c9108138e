"""Serves a task other than text generation."""

from __future__ import annotations

from collections.abc import Callable

from core.errors import RequestError
from core.protocol.messages import Change, Failed, FromEngine, NewRequest, Perform, Ready
from engine.serve.connection import Connection, Inbound
from engine.tasks.engine import TaskEngine
from engine.tasks.performer import Job


class TaskService:
    """The `Service` of an engine that performs a task."""

    def __init__(self, engine: TaskEngine, connection: Connection) -> None:
        self.engine = engine
        self._connection = connection

    def ready(self) -> Ready:
        return Ready(self.engine.facts)

    def prepares(self, client: bytes, message: NewRequest, arrival: float) -> bool:
        return False

    def add(self, message: NewRequest, now: float, send: Callable[[FromEngine], bool]) -> int:
        if not isinstance(message, Perform):
            raise self._refusal()
        job = Job(
            message.body,
            message.headers,
            lambda part: send(part.message(message.id, is_last=False)),
        )
        return self.engine.add(job, now)

    def handle(self, client: bytes, message: Inbound) -> None:
        if isinstance(message, Change):
            self._connection.send(client, Failed.of(message.id, self._refusal()))

    def _refusal(self) -> RequestError:
        return RequestError("task", f"this container serves {self.engine.facts.task}")
