"""LMI's text schema: `inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flask import Response, g

from container.apis.generation.sampling import Decoding
from container.apis.generation.service import Service
from container.apis.generation.stream import StreamFormat
from container.apis.text.answer import TextAnswer, TextStyle
from container.apis.text.batch import BatchAnswer, Item
from container.apis.text.schema import TextRequest, read_text_request
from core.errors import LongshoreError


class TextApi:
    """Answers one text, or a batch of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._style = TextStyle(service.prompting.tokenizer, service.options.tgi_compat)

    def answer(self, body: Mapping[str, object], form: StreamFormat) -> Response:
        """The answer to a body with `inputs`."""
        asked = read_text_request(body, always_details=self._service.options.tgi_compat)
        asked = replace(asked, decoding=self._service.checked(asked.decoding))
        self._service.warn(asked.warnings)
        texts = [each if isinstance(each, str) else "" for each in asked.inputs]
        prompts = self._service.prompting.encode(texts, max_tokens=asked.max_prompt_tokens)
        if asked.is_batch:
            items = [self._item(asked, at, prompt) for at, prompt in enumerate(prompts)]
            answer = BatchAnswer(items, g.request_id)
        else:
            answer = self._start(asked, 0, texts[0], prompts[0], asked.decoding)
        return self._service.respond(answer, stream=asked.stream, form=form)

    def _item(self, asked: TextRequest, at: int, prompt: Sequence[int]) -> Item:
        text = asked.inputs[at]
        if not isinstance(text, str):
            return text
        dialect = replace(asked.decoding.dialect, prompt=f"inputs[{at}]")
        try:
            return self._start(asked, at, text, prompt, replace(asked.decoding, dialect=dialect))
        except LongshoreError as error:
            return error

    def _start(
        self, asked: TextRequest, at: int, text: str, prompt: Sequence[int], decoding: Decoding
    ) -> TextAnswer:
        adapter = self._service.adapter(asked.adapters[at])
        generation = self._service.start(prompt, decoding, adapter=adapter)
        return TextAnswer(generation, text, asked, self._style)
