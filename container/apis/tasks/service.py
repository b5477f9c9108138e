"""The service of models whose task is not text generation."""

from __future__ import annotations

import msgspec

from container.apis.model_choice import model_choice
from container.apis.named_model import NamedModel
from container.http.request_context import RequestContext
from container.http.route import Contract
from container.http.service import Service
from container.wire.engine_client import EngineClient
from core.configuration.options import Options
from core.configuration.task import Task
from core.protocol.messages import Performed
from core.protocol.task_bodies import PipelineBody


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

    def variant(self, context: RequestContext, model: NamedModel) -> str:
        """Return the variant of the model that a request names; '' for the model itself.

        Raises RequestError as `model_choice` does.
        """
        return model_choice(self.model_name, self.options)(context, *model)

    def perform(self, context: RequestContext, body: PipelineBody, variant: str) -> Performed:
        """Return the answer of the model or of a variant. Raises what `wait_for` raises."""
        engine = self.client.choose(variant=variant)
        return self.wait_for(context, engine.perform(msgspec.msgpack.encode(body), {}, variant))
