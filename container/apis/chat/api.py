"""OpenAI's chat completions API: requests with `messages`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from container.apis.chat.message import ChoiceMessage
from container.apis.chat.response import ChatResponse
from container.apis.chat.schema import read_chat_request
from container.apis.chat.turn import Assistant
from container.apis.generation.response import ApiResponse
from container.apis.generation.service import GenerationService
from container.apis.openai import Envelope
from container.http.request_context import RequestContext


class ChatApi:
    """Answers conversations."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._assistant = Assistant(service)

    def start(self, context: RequestContext, body: Mapping[str, object]) -> ApiResponse:
        """Start to answer a body with `messages`."""
        request = context.checked(lambda: read_chat_request(body))
        context.warn(request.warnings)
        started = self._assistant.start(context, request.turn)
        id = f"chatcmpl-{request.response_options.request_id or context.id}"
        return ChatResponse(
            started.generation,
            request,
            Envelope(id, int(time.time()), started.model),
            self._service.prompting.tokenizer,
            [
                ChoiceMessage(
                    parser,
                    f"{id} {index}",
                    uses_functions=request.uses_functions,
                    shows_reasoning=request.shows_reasoning,
                )
                for index, parser in enumerate(started.parsers)
            ],
        )
