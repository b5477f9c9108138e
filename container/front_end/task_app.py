"""The WSGI application of one front-end worker, where the task is not to generate text."""

from __future__ import annotations

from flask import Flask

from container.apis.embeddings.api import EmbeddingApi
from container.apis.invocations.api import Invocations
from container.apis.models.api import ModelRoutes
from container.apis.tasks.handler import HandlerApi
from container.apis.tasks.host import TaskHost
from container.apis.tasks.pipeline import PipelineApi
from container.front_end.app import begin_app, complete_app
from container.wire.engine_client import EngineClient
from core.options import Options
from core.task import Task


def create_task_app(client: EngineClient, options: Options, model_name: str, task: Task) -> Flask:
    """All routes over one engine."""
    app = begin_app(options)
    host = TaskHost(client, options, model_name)
    ModelRoutes(host).add_to(app)
    match task.kind:
        case "embedding":
            api = EmbeddingApi(host)
            api.add_to(app)
        case "handler":
            api = HandlerApi(host)
        case _:
            api = PipelineApi(host, task)
    complete_app(app, Invocations(host, api), options, task.kind)
    return app
