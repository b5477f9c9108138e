"""OpenAI's chat completions: `messages`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from flask import Response, g, request

from container.answers.chat import ChatAnswer
from container.answers.message import Message
from container.answers.openai import Envelope
from container.answers.stream import StreamFormat
from container.schemas.chat import ChatRequest, read_chat_request
from container.service import Service
from core.errors import RequestError
from core.text.tools.base import ToolParser
from core.text.tools.factory import make_tool_parser


class ChatApi:
    """Answers a conversation."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def answer(self, body: Mapping[str, object], form: StreamFormat) -> Response:
        """The answer to a body with `messages`."""
        asked = read_chat_request(body)
        self._service.warn(asked.warnings)
        adapter = self._service.adapter(None, asked.model)
        parsers = self._tool_parsers(asked)
        prompting = self._service.prompting
        prompt = prompting.encode_chat(asked.conversation, size=len(request.get_data()))
        marks = parsers[0].special_tokens if parsers[0] else ()
        keep = prompting.tokenizer.ids_of(marks)
        generation = self._service.start(prompt, asked.decoding, keep=keep, adapter=adapter)
        id = f"chatcmpl-{g.request_id}"
        answer = ChatAnswer(
            generation,
            asked,
            Envelope(id, int(time.time()), adapter or self._service.model_name),
            prompting.tokenizer,
            [Message(parser, f"{id} {index}") for index, parser in enumerate(parsers)],
        )
        return self._service.respond(answer, stream=asked.stream, form=form)

    def _tool_parsers(self, asked: ChatRequest) -> Sequence[ToolParser | None]:
        """One for each choice."""
        if not asked.conversation.tools:
            return [None] * asked.n
        name = self._service.options.tool_call_parser
        if name is None:
            raise RequestError(
                "tools",
                "set option.tool_call_parser to the way in which the model writes calls",
            )
        return [make_tool_parser(name) for _ in range(asked.n)]
