"""OpenAI's completions: `prompt`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from flask import Response, g

from container.apis.completions.answer import CompletionsAnswer
from container.apis.completions.schema import CompletionRequest, read_completion_request
from container.apis.generation.service import Service
from container.apis.generation.stream import StreamFormat
from container.apis.openai.envelope import Envelope


class CompletionsApi:
    """Answers one prompt or several."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def answer(self, body: Mapping[str, object], form: StreamFormat) -> Response:
        """The answer to a body with `prompt`."""
        asked = read_completion_request(body)
        self._service.warn(asked.warnings)
        adapter = self._service.adapter(None, asked.model)
        prompts = self._encoded(asked)
        decoding = self._service.checked(asked.decoding)
        generations = self._service.start_all(prompts, decoding, adapter)
        model = adapter or self._service.model_name
        envelope = Envelope(f"cmpl-{g.request_id}", int(time.time()), model)
        echoes = self._echoes(asked) if asked.echo else [""] * len(prompts)
        tokenizer = self._service.prompting.tokenizer
        answer = CompletionsAnswer(generations, asked, envelope, echoes, tokenizer)
        return self._service.respond(answer, stream=asked.stream, form=form)

    def _encoded(self, asked: CompletionRequest) -> list[Sequence[int]]:
        texts = [each for each in asked.prompts if isinstance(each, str)]
        encoded = self._service.prompting.encode(texts, add_special_tokens=asked.add_special_tokens)
        tokens = iter(encoded)
        return [next(tokens) if isinstance(each, str) else each for each in asked.prompts]

    def _echoes(self, asked: CompletionRequest) -> list[str]:
        decode = self._service.prompting.decode
        return [each if isinstance(each, str) else decode(each) for each in asked.prompts]
