"""The WSGI application of one front-end worker."""

from __future__ import annotations

import re
import uuid

from flask import Flask, Response, g, request

from container.engine_client import EngineClient
from container.failures import register_failures
from container.prompting import Prompting
from container.routes.invocations import Invocations
from container.routes.openai import OpenAIRoutes
from container.service import Service
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
    Invocations(service).add_to(app)
    OpenAIRoutes(service).add_to(app)
    app.before_request(_name_request)
    app.after_request(_add_headers)
    register_failures(app)
    return app


def _name_request() -> None:
    """SageMaker's own id where it sent one that can stand in a log line, else a new one."""
    given = request.headers.get("X-Amzn-SageMaker-Inference-Id", "")
    g.request_id = given if re.fullmatch(r"[!-~]{1,64}", given) else uuid.uuid4().hex


def _add_headers(response: Response) -> Response:
    response.headers["X-Request-Id"] = g.request_id
    if warnings := g.get("warnings"):
        response.headers["X-Longshore-Warning"] = warnings
    return response
