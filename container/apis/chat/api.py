"""OpenAI's chat completions API: requests with `messages`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from container.apis.chat.message import ChoiceMessage
from container.apis.chat.response import ChatFormat
from container.apis.chat.schema import CHAT_FIELDS, read_chat_request
from container.apis.chat.turn import start_turn
from container.apis.generation.reply import Reply
from container.apis.generation.service import GenerationService, generates
from container.apis.generation.stream import EVENTS
from container.apis.openai import Envelope, openai_error
from container.http.request_context import RequestContext
from container.http.route import Api, Body, Errors, post


def start_chat(
    service: GenerationService, context: RequestContext, body: Mapping[str, object]
) -> Reply:
    """Start to answer a body with `messages`."""
    request = context.read(lambda: read_chat_request(body))
    turn = start_turn(service, context, request.turn)
    id = f"chatcmpl-{request.response_options.request_id or context.id}"
    format = ChatFormat(
        turn.generation,
        request,
        Envelope(id, int(time.time()), turn.model, context.digest),
        service.prompting.tokenizer,
        [
            ChoiceMessage(
                parser,
                f"{id} {index}",
                uses_functions=request.uses_functions,
                shows_reasoning=request.shows_reasoning,
            )
            for index, parser in enumerate(turn.parsers)
        ],
    )
    return Reply(format, turn.generation, stream=request.stream)


CHAT_BODY = Body("Chat", CHAT_FIELDS, ("messages",), title="`/v1/chat/completions`")
CHAT = Api(
    "OpenAI",
    (
        post("/v1/chat/completions", "OpenAI's chat completions.", generates(start_chat, EVENTS),
             CHAT_BODY),
    ),
    errors=Errors(openai_error, ("/v1/",)),
)  # fmt: skip
