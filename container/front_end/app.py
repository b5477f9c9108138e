"""The WSGI application of one front-end worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Flask

from container.apis.adapter_routes import AdapterRoutes
from container.apis.anthropic.api import MessagesRoutes
from container.apis.embeddings import EmbeddingApi
from container.apis.generation.formatters import Formatters, FormatterTokenizer, Functions
from container.apis.generation.prompting import Prompting
from container.apis.generation.service import GenerationService
from container.apis.invocations.api import Api, Invocations
from container.apis.invocations.runtime import RuntimeRoutes
from container.apis.model_routes import ModelRoutes
from container.apis.responses.api import ResponsesRoutes
from container.apis.status import StatusRoutes
from container.apis.tasks.handler import HandlerApi
from container.apis.tasks.pipeline import PipelineApi
from container.apis.text.tgi import TgiRoutes
from container.apis.tokenize import TokenizeRoutes
from container.front_end.generation_routes import GenerationApi, OpenAIRoutes
from container.front_end.openapi import openapi_document
from container.front_end.upgrade import UpgradeRoute
from container.hooks.app import HookedFlask
from container.hooks.load import Hooks
from container.http.cors import register_cors
from container.http.failures import register_failures
from container.http.headers import register_headers
from container.http.health import register_engine_wait
from container.http.request_log import register_request_log
from container.http.service import Service, json_response
from container.isolation.helper import Helper
from container.security.authentication import Gate
from container.ui.routes import EVENTS_ENDPOINT, KEYLESS_ENDPOINTS, PageRoutes
from container.wire.engine_client import EngineClient
from core.configuration.options import Options
from core.configuration.task import Kind, Task
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from container.tracing.tracing import Tracing


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    options: Options,
    model_name: str,
    template: ChatTemplate | None = None,
    formatters: Functions | None = None,
    gate: Gate | None = None,
    helper: Helper | None = None,
    tracing: Tracing | None = None,
    hooks: Hooks | None = None,
) -> Flask:
    """Return the application for a model that generates text.

    helper: an existing helper with the same tokenizer and template, to use instead of a new one.
    """
    helper = helper or Helper(tokenizer.model_dir, template.source if template else None)
    prompting = Prompting(tokenizer, template, lambda: client.facts.max_model_len, helper)
    service = GenerationService(client, prompting, helper, options, model_name)
    user_formatters = None
    if formatters is not None:
        user_formatters = Formatters(formatters, FormatterTokenizer(tokenizer, template))
    api = GenerationApi(service, user_formatters)
    app = _create(service, api, "generation", gate, tracing, hooks)
    AdapterRoutes(service).add_to(app)
    OpenAIRoutes(service).add_to(app)
    ResponsesRoutes(service).add_to(app)
    MessagesRoutes(service).add_to(app)
    TgiRoutes(service).add_to(app)
    TokenizeRoutes(service).add_to(app)
    UpgradeRoute(options).add_to(app)
    add_aliases(app)
    PageRoutes(service, has_chat_template=template is not None).add_to(app)
    return app


def create_task_app(
    client: EngineClient,
    options: Options,
    model_name: str,
    task: Task,
    gate: Gate | None = None,
    tracing: Tracing | None = None,
    hooks: Hooks | None = None,
) -> Flask:
    """Return the application for a model whose task is not text generation."""
    service = Service(client, options, model_name)
    match task.kind:
        case "embedding":
            api = EmbeddingApi(service)
            app = _create(service, api, task.kind, gate, tracing, hooks)
            api.add_to(app)
        case "handler":
            app = _create(service, HandlerApi(service), task.kind, gate, tracing, hooks)
        case _:
            api = PipelineApi(service, task)
            app = _create(service, api, task.kind, gate, tracing, hooks)
            api.add_to(app)
    add_aliases(app)
    return app


def _create(
    service: Service,
    api: Api,
    kind: Kind,
    gate: Gate | None,
    tracing: Tracing | None,
    hooks: Hooks | None,
) -> Flask:
    """Return an application with the routes, headers and error handlers that all tasks share."""
    options = service.options
    name = "longshore"
    app = HookedFlask(name, hooks) if hooks is not None else Flask(name, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = options.server.max_request_size
    ModelRoutes(service).add_to(app)
    StatusRoutes(service).add_to(app)
    invocations = Invocations(service, api)
    invocations.add_to(app)
    if options.server.local_runtime_api:
        RuntimeRoutes(invocations).add_to(app)
    document = openapi_document(kind, with_runtime=options.server.local_runtime_api)
    app.add_url_rule("/openapi.json", "openapi", lambda: json_response(document))
    register_headers(app)
    if options.server.cors_allowed_origin is not None:
        register_cors(app, options.server.cors_allowed_origin)
    if gate is not None:
        gate.add_to(app, KEYLESS_ENDPOINTS)
    register_engine_wait(app, service.client, (*KEYLESS_ENDPOINTS, EVENTS_ENDPOINT))
    register_failures(
        app,
        overload_status=int(options.server.overload_status),
        count_refusal=service.client.count_refusal,
    )
    if options.server.log_requests != "false":
        register_request_log(app, with_bodies=options.server.log_requests == "bodies")
    if tracing is not None:
        tracing.add_to(app, service.model_name)
    return app


def add_aliases(app: Flask) -> None:
    """Serve each route below /v1/ also below /openai/v1/, where KServe's clients expect it."""
    for rule in list(app.url_map.iter_rules()):
        if rule.rule.startswith("/v1/"):
            app.add_url_rule(
                f"/openai{rule.rule}",
                f"openai {rule.endpoint} {rule.rule}",
                app.view_functions[rule.endpoint],
                methods=(rule.methods or set()) - {"OPTIONS", "HEAD"},
            )
