"""The WSGI application of one front-end worker."""

from __future__ import annotations

from flask import Flask

from container.engine_client import EngineClient
from container.failures import register_failures
from container.formatters import Formatters, FormatterTokenizer, Functions
from container.headers import register_headers
from container.host import json_response
from container.openapi import openapi_document
from container.prompting import Prompting
from container.routes.adapters import AdapterRoutes
from container.routes.generation import GenerationApi
from container.routes.invocations import Invocations
from container.routes.models import ModelRoutes
from container.routes.openai import OpenAIRoutes
from container.routes.runtime import RuntimeRoutes
from container.service import Service
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
    """All routes over one engine that generates text; `container.task_app` is for other tasks."""
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
