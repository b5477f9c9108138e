"""OpenAI's chat completions: `messages`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from flask import Response, g, request

from container.apis.chat.answer import ChatAnswer
from container.apis.chat.message import Message
from container.apis.chat.schema import ChatRequest, read_chat_request
from container.apis.generation.sampling import Decoding
from container.apis.generation.service import Service
from container.apis.generation.stream import StreamFormat
from container.apis.openai.envelope import Envelope
from core.errors import RequestError
from core.options import ToolCallParser
from core.text.tools.base import ToolParser
from core.text.tools.factory import make_tool_parser

PLAIN_CALLS: ToolCallParser = "llama3_json"
"""How a model is made to write calls whose own way is not known: as JSON and nothing else."""


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
        marks = prompting.tokenizer.ids_of(parsers[0].special_tokens) if parsers[0] else {}
        decoding = self._service.checked(self._decoding(asked, parsers[0], marks))
        generation = self._service.start(prompt, decoding, keep=marks.values(), adapter=adapter)
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
        if name is None and asked.forced_calls is None:
            raise RequestError(
                "tools",
                "set option.tool_call_parser to the way in which the model writes calls",
            )
        return [make_tool_parser(name or PLAIN_CALLS) for _ in range(asked.n)]

    def _decoding(
        self, asked: ChatRequest, parser: ToolParser | None, marks: Mapping[str, int]
    ) -> Decoding:
        """With calls that are forced as the form of the answer. `marks`: of the notation, those
        that are tokens of the vocabulary."""
        calls = asked.forced_calls
        if calls is None or parser is None:
            return asked.decoding
        is_special = self._service.prompting.tokenizer.is_special
        special = {text: token_id for text, token_id in marks.items() if is_special(token_id)}
        form = parser.notation(marks).form(calls.functions, special, is_one=calls.is_one)
        return asked.decoding.with_form(form, "tools")
