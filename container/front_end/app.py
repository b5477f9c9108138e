"""The WSGI application of one front-end worker."""

from __future__ import annotations

from flask import Flask

from container.apis.adapters.api import AdapterRoutes
from container.apis.generation.formatters import Formatters, FormatterTokenizer, Functions
from container.apis.generation.prompting import Prompting
from container.apis.generation.service import Service
from container.apis.invocations.api import Invocations
from container.apis.invocations.runtime import RuntimeRoutes
from container.apis.models.api import ModelRoutes
from container.front_end.generation_routes import GenerationApi
from container.front_end.openai_routes import OpenAIRoutes
from container.front_end.openapi import openapi_document
from container.http.failures import register_failures
from container.http.headers import register_headers
from container.http.host import json_response
from container.wire.engine_client import EngineClient
from core.options import Options
from core.task import Kind
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
    """All routes over one engine that generates text; see `task_app` for other tasks."""
    app = begin_app(options)
    prompting = Prompting(tokenizer, template)
    service = Service(client, prompting, options, model_name)
    ModelRoutes(service).add_to(app)
    AdapterRoutes(service).add_to(app)
    OpenAIRoutes(service).add_to(app)
    formatted = service  # as in LMI, formatters have to do with SageMaker's door alone
    if formatters is not None:
        applied = Formatters(formatters, FormatterTokenizer(tokenizer, template))
        formatted = Service(client, prompting, options, model_name, applied)
    complete_app(app, Invocations(service, GenerationApi(formatted)), options, "generation")
    return app


def begin_app(options: Options) -> Flask:
    """An application without routes."""
    app = Flask("longshore", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = options.max_request_size
    return app


def complete_app(app: Flask, invocations: Invocations, options: Options, kind: Kind) -> None:
    """Adds what every task has: SageMaker's door, the document, headers and errors."""
    invocations.add_to(app)
    if options.local_runtime_api:
        RuntimeRoutes(invocations).add_to(app)
    document = openapi_document(kind, with_runtime=options.local_runtime_api)
    app.add_url_rule("/openapi.json", "openapi", lambda: json_response(document))
    register_headers(app)
    register_failures(app)
