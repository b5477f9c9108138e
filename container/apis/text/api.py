"""LMI's text API: requests with `inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from container.apis.generation.generations import Generations
from container.apis.generation.reply import ApiResponse, Reply
from container.apis.text.batch import BatchReply, Item
from container.apis.text.response import TextFormat
from container.apis.text.schema import TextRequest, input_text, read_text_request
from container.http.off_loop import Turns
from container.http.request_context import RequestContext
from core.errors import LongshoreError, RequestError


def start_text(
    generations: Generations,
    context: RequestContext,
    body: Mapping[str, object],
    form: type[TextFormat],
) -> ApiResponse:
    """Start to answer a body with `inputs`, which is one input or a batch."""
    request = context.read(lambda: read_text_request(body, always_details=form.always_details))
    request = replace(request, decoding=generations.prepare(request.decoding))
    inputs = Inputs(generations, context, request, form)
    return inputs.start_batch() if request.is_batch else inputs.start_one()


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one request."""

    generations: Generations
    context: RequestContext
    request: TextRequest
    form: type[TextFormat]

    def start_one(self) -> Reply:
        """Start the answer to the only input."""
        text = self._text(0)
        return self._start(0, text, *self._encode([text]))

    def start_batch(self) -> BatchReply:
        """Start the answers to a batch. Each input succeeds or fails on its own."""
        num_inputs = len(self.request.inputs)
        texts = [self._text_or_error(index) for index in range(num_inputs)]
        prompts = self._encode([text if isinstance(text, str) else "" for text in texts])
        items: list[Item] = []
        batch = BatchReply(items, self.context.id, stream=self.request.stream)
        turns = Turns()
        try:
            for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
                turns.give()
                items.append(self._start_or_error(index, text, prompt))
        except BaseException:
            batch.abort()
            raise
        return batch

    def _text(self, index: int) -> str:
        text, field = self.request.inputs[index], self.request.prompt_field(index)
        checked = input_text(text, field)
        self.generations.prompting.check_length(checked, field)
        return checked

    def _encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        max_tokens = self.request.max_prompt_tokens
        return self.generations.prompting.encode(texts, max_tokens=max_tokens)

    def _start(self, index: int, text: str, prompt: Sequence[int]) -> Reply:
        request, context = self.request, self.context
        adapter = self.generations.choose_variant(context, request.adapters[index], None)
        generation = self.generations.start(
            context, prompt, request.decoding_of(index), variant=adapter
        )
        format = self.form(generation, text, request, self.generations.prompting.tokenizer)
        return Reply(format, generation, stream=request.stream)

    def _text_or_error(self, index: int) -> str | RequestError:
        try:
            return self._text(index)
        except RequestError as error:
            return error

    def _start_or_error(self, index: int, text: str | RequestError, prompt: Sequence[int]) -> Item:
        if isinstance(text, RequestError):
            return text
        try:
            return self._start(index, text, prompt)
        except LongshoreError as error:
            return error
