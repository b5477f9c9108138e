"""The WSGI application of one front-end worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Flask

from container.apis.generation.formatters import Formatters, FormatterTokenizer, Functions
from container.apis.generation.service import GenerationService
from container.apis.table import contract_of, error_body
from container.apis.tasks.service import TaskService
from container.apis.text_generation import invocation
from container.hooks.app import HookedFlask
from container.hooks.load import Hooks
from container.http.cors import register_cors
from container.http.failures import register_failures
from container.http.headers import register_headers
from container.http.health import register_engine_wait
from container.http.request_log import register_request_log
from container.http.service import Service
from container.isolation.helper import Helper
from container.security.authentication import Gate
from container.ui.routes import EVENTS_ENDPOINT, KEYLESS_ENDPOINTS, PageRoutes
from container.wire.engine_client import EngineClient
from core.configuration.options import Options
from core.configuration.task import Task
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
    user_formatters = None
    if formatters is not None:
        user_formatters = Formatters(formatters, FormatterTokenizer(tokenizer, template))
    contract = contract_of("generation", options.server, invocation(options, user_formatters))
    service = GenerationService(client, tokenizer, template, helper, options, model_name, contract)
    app = _create(service, gate, tracing, hooks)
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
    contract = contract_of(task.kind, options.server)
    service = TaskService(client, options, model_name, contract, task)
    return _create(service, gate, tracing, hooks)


def _create(
    service: Service, gate: Gate | None, tracing: Tracing | None, hooks: Hooks | None
) -> Flask:
    """Return an application with the routes, headers and error handlers that all tasks share."""
    options = service.options
    name = "longshore"
    app = HookedFlask(name, hooks) if hooks is not None else Flask(name, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = options.server.max_request_size
    for api in service.contract.apis:
        api.add_to(app, service)
    register_headers(app)
    if options.server.cors_allowed_origin is not None:
        register_cors(app, options.server.cors_allowed_origin)
    if gate is not None:
        gate.add_to(app, KEYLESS_ENDPOINTS)
    register_engine_wait(app, service.client, (*KEYLESS_ENDPOINTS, EVENTS_ENDPOINT))
    register_failures(
        app,
        error_body,
        overload_status=int(options.server.overload_status),
        count_refusal=service.client.count_refusal,
    )
    if options.server.log_requests != "false":
        register_request_log(app, with_bodies=options.server.log_requests == "bodies")
    if tracing is not None:
        tracing.add_to(app, service.model_name)
    return app
