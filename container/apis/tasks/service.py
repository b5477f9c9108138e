"""The service of models whose task is not text generation."""

from __future__ import annotations

from container.http.route import Contract
from container.http.service import Service
from container.wire.engine_client import EngineClient
from core.configuration.options import Options
from core.configuration.task import Task


class TaskService(Service):
    """A service that knows the model's task."""

    def __init__(
        self,
        client: EngineClient,
        options: Options,
        model_name: str,
        contract: Contract,
        task: Task,
    ) -> None:
        super().__init__(client, options, model_name, contract)
        self.task = task
