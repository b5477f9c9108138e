"""The WSGI application of one front-end worker."""

from __future__ import annotations

from flask import Flask

from container.apis.adapters import AdapterRoutes
from container.apis.embeddings import EmbeddingApi
from container.apis.generation.formatters import Formatters, FormatterTokenizer, Functions
from container.apis.generation.prompting import Prompting
from container.apis.generation.service import GenerationService
from container.apis.invocations.api import Api, Invocations
from container.apis.invocations.runtime import RuntimeRoutes
from container.apis.models import ModelRoutes
from container.apis.tasks.handler import HandlerApi
from container.apis.tasks.pipeline import PipelineApi
from container.apis.tokenize import TokenizeRoutes
from container.front_end.generation_routes import GenerationApi, OpenAIRoutes
from container.front_end.openapi import openapi_document
from container.http.failures import register_failures
from container.http.headers import register_headers
from container.http.service import Service, json_response
from container.ui.routes import PageRoutes
from container.wire.engine_client import EngineClient
from core.options import Options
from core.task import Kind, Task
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    options: Options,
    model_name: str,
    template: ChatTemplate | None = None,
    formatters: Functions | None = None,
) -> Flask:
    """Return the application for a model that generates text."""
    prompting = Prompting(tokenizer, template)
    service = GenerationService(client, prompting, options, model_name)
    # As in LMI, formatters apply only to /invocations and its aliases.
    formatted_service = service
    if formatters is not None:
        user_formatters = Formatters(formatters, FormatterTokenizer(tokenizer, template))
        formatted_service = GenerationService(
            client, prompting, options, model_name, user_formatters
        )
    app = _create(service, GenerationApi(formatted_service), "generation")
    AdapterRoutes(service).add_to(app)
    OpenAIRoutes(service).add_to(app)
    TokenizeRoutes(service).add_to(app)
    PageRoutes(service, has_chat_template=template is not None).add_to(app)
    return app


def create_task_app(client: EngineClient, options: Options, model_name: str, task: Task) -> Flask:
    """Return the application for a model whose task is not text generation."""
    service = Service(client, options, model_name)
    match task.kind:
        case "embedding":
            api = EmbeddingApi(service)
            app = _create(service, api, task.kind)
            api.add_to(app)
            return app
        case "handler":
            return _create(service, HandlerApi(service), task.kind)
        case _:
            return _create(service, PipelineApi(service, task), task.kind)


def _create(service: Service, api: Api, kind: Kind) -> Flask:
    """Return an application with the routes, headers and error handlers that all tasks share."""
    options = service.options
    app = Flask("longshore", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = options.max_request_size
    ModelRoutes(service).add_to(app)
    invocations = Invocations(service, api)
    invocations.add_to(app)
    if options.local_runtime_api:
        RuntimeRoutes(invocations).add_to(app)
    document = openapi_document(kind, with_runtime=options.local_runtime_api)
    app.add_url_rule("/openapi.json", "openapi", lambda: json_response(document))
    register_headers(app)
    register_failures(app)
    return app
