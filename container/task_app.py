"""The WSGI application of one front-end worker, where the task is not to generate text."""

from __future__ import annotations

from flask import Flask

from container.app import begin_app, complete_app
from container.engine_client import EngineClient
from container.routes.embeddings import EmbeddingApi
from container.routes.handler import HandlerApi
from container.routes.invocations import Invocations
from container.routes.models import ModelRoutes
from container.routes.pipeline import PipelineApi
from container.task_host import TaskHost
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
