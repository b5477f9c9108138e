"""The WSGI application of one front-end worker."""

from __future__ import annotations

from flask import Flask

from container.engine_client import EngineClient
from container.failures import register_failures
from container.headers import register_headers
from container.openapi import openapi_document
from container.prompting import Prompting
from container.routes.invocations import Invocations
from container.routes.openai import OpenAIRoutes
from container.routes.runtime import RuntimeRoutes
from container.service import Service, json_response
from core.options import Options
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    options: Options,
    model_name: str,
    template: ChatTemplate | None = None,
) -> Flask:
    """All routes over one engine."""
    app = Flask("longshore", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = options.max_request_size
    service = Service(client, Prompting(tokenizer, template), options, model_name)
    invocations = Invocations(service)
    invocations.add_to(app)
    OpenAIRoutes(service).add_to(app)
    if options.local_runtime_api:
        RuntimeRoutes(invocations).add_to(app)
    document = openapi_document(with_runtime=options.local_runtime_api)
    app.add_url_rule("/openapi.json", "openapi", lambda: json_response(document))
    register_headers(app)
    register_failures(app)
    return app
