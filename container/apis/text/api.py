"""LMI's text API: requests with `inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from container.apis.generation.generations import Generations
from container.apis.generation.reply import ApiResponse, Reply
from container.apis.text.batch import BatchReply, Item
from container.apis.text.response import TextFormat
from container.apis.text.schema import Batch, TextRequest, read_text_request
from container.http.off_loop import Turns
from container.http.request_context import RequestContext
from core.errors import LongshoreError, RequestError
from core.protocol.messages import EncodedPrompt


def start_text(
    generations: Generations,
    context: RequestContext,
    body: Mapping[str, object],
    form: type[TextFormat],
) -> ApiResponse:
    """Start to answer a body with `inputs`, which is one input or a batch."""
    request = context.read(lambda: read_text_request(body, always_details=form.always_details))
    request = replace(request, decoding=generations.prepare(request.decoding))
    start = Start(generations, context, form)
    return start.one(request) if request.batch is None else start.all_of(request, request.batch)


@dataclass(frozen=True, slots=True)
class Start:
    """Starts the answers to the inputs of one request."""

    generations: Generations
    context: RequestContext
    form: type[TextFormat]

    def one(self, request: TextRequest) -> Reply:
        """Start the answer to the only input."""
        prompting = self.generations.prompting
        prompting.check_length(request.text, "inputs")
        prompt = prompting.encode(request.text, max_tokens=request.max_prompt_tokens)
        return self._start(request, prompt)

    def all_of(self, request: TextRequest, batch: Batch) -> BatchReply:
        """Start the answers to a batch. Each input succeeds or fails on its own."""
        requests = [self._of_input(request, batch, index) for index in range(len(batch.inputs))]
        texts = [each.text if isinstance(each, TextRequest) else "" for each in requests]
        prompting, max_tokens = self.generations.prompting, request.max_prompt_tokens
        items: list[Item] = []
        reply = BatchReply(items, self.context.id, stream=request.stream)
        turns = Turns()
        try:
            prompts = prompting.encode_all(texts, max_tokens=max_tokens)
            for each, prompt in zip(requests, prompts, strict=True):
                turns.give()
                items.append(self._start_or_error(each, prompt))
        except BaseException:
            reply.abort()
            raise
        return reply

    def _start(self, request: TextRequest, prompt: Sequence[int]) -> Reply:
        generations, context = self.generations, self.context
        variant = generations.choose_variant(context, *request.model)
        generation = generations.start(
            context, EncodedPrompt(prompt), request.decoding, variant=variant
        )
        format = self.form(generation, request, generations.prompting.tokenizer)
        return Reply(format, generation, stream=request.stream)

    def _of_input(
        self, request: TextRequest, batch: Batch, index: int
    ) -> TextRequest | RequestError:
        try:
            its_own = request.of_input(batch, index)
            self.generations.prompting.check_length(its_own.text, its_own.decoding.dialect.prompt)
        except RequestError as error:
            return error
        return its_own

    def _start_or_error(self, request: TextRequest | RequestError, prompt: Sequence[int]) -> Item:
        if isinstance(request, RequestError):
            return request
        try:
            return self._start(request, prompt)
        except LongshoreError as error:
            return error
