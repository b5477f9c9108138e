"""Anthropic's messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping

from flask import Response

from container.apis.anthropic.response import MessageFormat, anthropic_error
from container.apis.anthropic.schema import (
    COUNT_FIELDS,
    MESSAGES_FIELDS,
    read_count_request,
    read_messages_request,
)
from container.apis.chat.turn import start_turn
from container.apis.generation.reply import Reply
from container.apis.generation.service import GenerationService, generates
from container.apis.generation.stream import NAMED_EVENTS
from container.http.request_context import RequestContext, request_context
from container.http.route import Api, Body, Errors, post
from container.http.service import json_response


def start_message(
    service: GenerationService, context: RequestContext, body: Mapping[str, object]
) -> Reply:
    request = context.read(lambda: read_messages_request(body))
    turn = start_turn(service, context, request.turn)
    format = MessageFormat(turn, f"msg_{request.request_id or context.id}")
    return Reply(format, turn.generation, stream=request.stream)


def count_tokens(service: GenerationService) -> Response:
    context = request_context()
    body = context.json_fields()
    request = context.read(lambda: read_count_request(body))
    prompt = service.conversations.encode(request.conversation, size=len(context.body))
    return json_response({"input_tokens": len(prompt.token_ids)})


MESSAGES = Api(
    "Anthropic",
    (
        post("/v1/messages", "Anthropic's messages.", generates(start_message, NAMED_EVENTS),
             Body("Messages", MESSAGES_FIELDS, ("messages",), title="`/v1/messages`")),
        post("/v1/messages/count_tokens", "Count the tokens of Anthropic's messages.", count_tokens,
             Body("CountTokens", COUNT_FIELDS, ("messages",), title="`/v1/messages/count_tokens`")),
    ),
    errors=Errors(anthropic_error, ("/v1/messages",)),
)  # fmt: skip
"""Clients use the `base_url` http://HOST:PORT."""
