"""LMI's text API: requests with `inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from container.apis.generation.response import ApiResponse
from container.apis.generation.service import GenerationService
from container.apis.text.batch import BatchResponse, Item
from container.apis.text.response import Form, TextResponse, TextStyle, form_of
from container.apis.text.schema import TextRequest, read_text_request
from container.http.off_loop import Turns
from container.http.request_context import RequestContext
from core.errors import LongshoreError, RequestError


class TextApi:
    """Answers requests with one input or a batch of them."""

    def __init__(self, service: GenerationService, form: Form | None = None) -> None:
        """form: the shape of answers; by default the shape that the options ask for."""
        self._service = service
        self._style = TextStyle(service.prompting.tokenizer, form or form_of(service.options))

    def start(self, context: RequestContext, body: Mapping[str, object]) -> ApiResponse:
        """Start to answer a body with `inputs`.

        In a batch, each input succeeds or fails on its own.
        """
        service = self._service
        always_details = self._style.form == "tgi"
        request = context.checked(lambda: read_text_request(body, always_details=always_details))
        request = replace(request, decoding=service.for_engine(request.decoding))
        context.warn(request.warnings)
        inputs = [self._fitting(text, request, index) for index, text in enumerate(request.inputs)]
        texts = ["" if isinstance(text, LongshoreError) else text for text in inputs]
        prompts = service.prompting.encode(texts, max_tokens=request.max_prompt_tokens)
        items: list[Item] = []
        batch = BatchResponse(items, context.id, stream=request.stream)
        turns = Turns()
        try:
            for index, (text, prompt) in enumerate(zip(inputs, prompts, strict=True)):
                turns.give()
                items.append(self._start_one(context, request, index, text, prompt))
        except BaseException:
            batch.abort()
            raise
        if request.is_batch:
            return batch
        response = items[0]
        assert not isinstance(response, LongshoreError)  # it was raised above
        return response

    def _fitting(
        self, text: str | RequestError, request: TextRequest, index: int
    ) -> str | RequestError:
        try:
            if isinstance(text, str):
                self._service.prompting.check_length(text, request.prompt_field(index))
        except RequestError as error:
            return error
        return text

    def _start_one(
        self,
        context: RequestContext,
        request: TextRequest,
        index: int,
        text: str | RequestError,
        prompt: Sequence[int],
    ) -> Item:
        """Start the answer to one input. In a batch, returns the error of an input that fails."""
        service = self._service
        try:
            if isinstance(text, LongshoreError):
                raise text
            adapter = service.adapter(context, request.adapters[index])
            (generation,) = service.start(
                context, [prompt], request.decoding_of(index), adapter=adapter
            )
            return TextResponse(generation, text, request, self._style)
        except LongshoreError as error:
            if not request.is_batch:
                raise
            return error
