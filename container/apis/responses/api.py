"""OpenAI's responses API: POST /v1/responses. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Mapping

from container.apis.chat.turn import start_turn
from container.apis.generation.reply import Reply
from container.apis.generation.service import GenerationService, generates
from container.apis.generation.stream import NAMED_EVENTS
from container.apis.responses.response import ResponseFormat
from container.apis.responses.schema import RESPONSES_FIELDS, read_responses_request
from container.http.request_context import RequestContext
from container.http.route import Api, Body, post


def start_response(
    service: GenerationService, context: RequestContext, body: Mapping[str, object]
) -> Reply:
    request = context.read(lambda: read_responses_request(body))
    turn = start_turn(service, context, request.turn)
    id = f"resp_{request.request_id or context.id}"
    name = service.prompting.tokenizer.piece
    format = ResponseFormat(turn, request, id, int(time.time()), name)
    return Reply(format, turn.generation, stream=request.stream)


RESPONSES = Api(
    "OpenAI",
    (
        post("/v1/responses", "OpenAI's responses. Nothing is stored.",
             generates(start_response, NAMED_EVENTS),
             Body("Response", RESPONSES_FIELDS, ("input",), title="`/v1/responses`")),
    ),
)  # fmt: skip
