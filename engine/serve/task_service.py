"""Serves a task other than text generation."""

from __future__ import annotations

from collections.abc import Callable

from core.errors import RequestError
from core.protocol.messages import FromEngine, NewRequest, Perform, Ready
from engine.serve.connection import Connection, Inbound
from engine.serve.variant_service import VariantService
from engine.tasks.engine import TaskEngine
from engine.tasks.performer import Job


class TaskService:
    """The `Service` of an engine that performs a task."""

    def __init__(self, engine: TaskEngine, connection: Connection) -> None:
        self.engine = engine
        self._variants = VariantService(engine, connection)

    def ready(self) -> Ready:
        return Ready(self.engine.facts, self._variants.loaded)

    def prepares(self, client: bytes, message: NewRequest, arrival: float) -> bool:
        return False

    def add(self, message: NewRequest, now: float, send: Callable[[FromEngine], bool]) -> int:
        if not isinstance(message, Perform):
            raise RequestError("task", f"this container serves {self.engine.facts.task}")
        job = Job(
            message.body,
            message.headers,
            lambda part: send(part.message(message.id, is_last=False)),
            self._variants.parts(message.variant),
        )
        return self.engine.add(job, now)

    def handle(self, client: bytes, message: Inbound) -> None:
        self._variants.handle(client, message)
