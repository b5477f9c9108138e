"""OpenAI's chat completions API: requests with `messages`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from flask import Response

from container.apis.chat.message import Message
from container.apis.chat.response import ChatResponse
from container.apis.chat.schema import ChatRequest, read_chat_request
from container.apis.generation.sampling import Decoding
from container.apis.generation.service import GenerationService
from container.apis.generation.stream import StreamFormat
from container.apis.openai import Envelope
from container.http.request_context import RequestContext
from core.errors import RequestError
from core.options import ToolCallParser
from core.text.tools.base import ToolParser
from core.text.tools.factory import make_tool_parser

DEFAULT_TOOL_PARSER: ToolCallParser = "llama3_json"
"""For forced calls without option.tool_call_parser: the call is plain JSON and nothing else."""


class ChatApi:
    """Answers conversations."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    def answer(
        self, context: RequestContext, body: Mapping[str, object], stream_format: StreamFormat
    ) -> Response:
        """Answer a body with `messages`."""
        service, prompting = self._service, self._service.prompting
        request = context.checked(lambda: read_chat_request(body))
        context.warn(request.warnings)
        adapter = service.adapter(context, request.adapter, request.model)
        parsers = self._tool_parsers(request)
        prompt = prompting.encode_chat(request.conversation, size=len(context.body))
        marks = prompting.tokenizer.ids_of(parsers[0].special_tokens) if parsers[0] else {}
        decoding = service.with_checked_grammar(self._decoding(request, parsers[0], marks))
        decoding = service.with_tokenized_words(decoding)
        (generation,) = service.start(
            context, [prompt], decoding, adapter=adapter, keep=marks.values()
        )
        id = f"chatcmpl-{request.shown.request_id or context.id}"
        response = ChatResponse(
            generation,
            request,
            Envelope(id, int(time.time()), adapter or service.model_name),
            prompting.tokenizer,
            [
                Message(parser, f"{id} {index}", uses_functions=request.uses_functions)
                for index, parser in enumerate(parsers)
            ],
        )
        return service.send(context, response, stream=request.stream, stream_format=stream_format)

    def _tool_parsers(self, request: ChatRequest) -> Sequence[ToolParser | None]:
        """Return a parser for each choice; None for each if the request has no tools."""
        if not request.conversation.tools:
            return [None] * request.n
        name = self._service.options.tool_call_parser
        if name is None and request.forced_calls is None:
            raise RequestError(
                "tools",
                "set option.tool_call_parser to the format in which the model writes tool calls",
            )
        return [make_tool_parser(name or DEFAULT_TOOL_PARSER) for _ in range(request.n)]

    def _decoding(
        self, request: ChatRequest, parser: ToolParser | None, marks: Mapping[str, int]
    ) -> Decoding:
        """Return the request's decoding, with forced calls turned into structured outputs.

        `marks` are the special tokens of the call format that the vocabulary has, with their ids.
        """
        calls = request.forced_calls
        if calls is None or parser is None:
            return request.decoding
        is_special = self._service.prompting.tokenizer.is_special
        special = {text: token_id for text, token_id in marks.items() if is_special(token_id)}
        form = parser.notation(marks).form(calls.functions, special, is_one=calls.is_one)
        return request.decoding.with_structured_outputs(form, "tools")
