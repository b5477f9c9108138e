"""The service of all text generation APIs: it starts generations and sends responses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import msgspec
from flask import Response

from container.apis.generation.conversation import Conversation
from container.apis.generation.generation import Generation
from container.apis.generation.prompting import Prompting
from container.apis.generation.reply import ApiResponse
from container.apis.generation.sampling import Decoding
from container.apis.generation.stream import MIMETYPES, StreamFormat, stream_lines
from container.http.deadline import Deadline
from container.http.off_loop import Turns, in_thread_if_long
from container.http.request_context import RequestContext, request_context
from container.http.route import Contract
from container.http.service import Service, json_response
from container.isolation.helper import Helper
from container.wire.engine_client import EngineClient
from core.adapter import lora_disabled
from core.configuration.limits import BAD_WORDS_CHARACTERS, PROMPT_LOGPROBS
from core.configuration.options import Options
from core.errors import RequestError
from core.images import NO_IMAGES, EncodedPrompt, PromptImage
from core.request_check import checked
from core.sampling import SamplingParams
from core.text.answers import Answers
from core.text.bad_words import with_bad_word_ids

ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


class GenerationService(Service):
    """Everything between an API's checked request and the engine, for models that generate."""

    def __init__(
        self,
        client: EngineClient,
        prompting: Prompting,
        helper: Helper,
        options: Options,
        model_name: str,
        contract: Contract,
    ) -> None:
        super().__init__(client, options, model_name, contract)
        self.prompting = prompting
        self._helper = helper

    def adapter(self, context: RequestContext, from_body: str | None, model: object = None) -> str:
        """Return the name of the LoRA adapter for a request; '' for none.

        The first of these wins: `from_body`, the adapter that the body names; SageMaker's header;
        OpenAI's `model`, unless it is the model's own name. Raises RequestError if a name is given
        while LoRA is disabled. Whether the adapter is loaded is checked by the engine.
        """
        from_header = context.headers.get(ADAPTER_HEADER)
        if not self.options.lora.enable_lora:
            for field, name in (("adapters", from_body), (ADAPTER_HEADER, from_header)):
                if name:
                    raise lora_disabled(field)
            return ""
        if from_body is not None:
            return from_body
        if from_header or model is None or model == self.model_name:
            return from_header or ""
        if not isinstance(model, str):
            raise RequestError("model", "expected a string")
        return model

    def encode_chat(self, context: RequestContext, conversation: Conversation) -> EncodedPrompt:
        """Return a conversation's tokens and images.

        Raises RequestError for images if the model takes none, and as `Prompting.encode_chat` does.
        """
        if conversation.images and not self.client.facts.takes_images:
            raise RequestError(conversation.images[0].field, NO_IMAGES)
        return self.prompting.encode_chat(conversation, size=len(context.body))

    def for_engine(self, decoding: Decoding) -> Decoding:
        """Return the decoding as the engine takes it: with a grammar and the tokens of bad words.

        Raises RequestError if the structured outputs are invalid or too complex, or if the bad
        words are too long.
        """
        params, dialect = decoding.params, decoding.dialect
        if params.structured_outputs is not None:
            try:
                grammar = self._helper.grammar(
                    params.structured_outputs, self.client.facts.eos_token_ids
                )
            except RequestError as error:
                raise dialect.error(error) from None
            params = msgspec.structs.replace(params, structured_outputs=grammar)
        num_characters = sum(map(len, params.bad_words))
        BAD_WORDS_CHARACTERS.check(dialect.name("bad_words"), num_characters)
        tokenizer = self.prompting.tokenizer
        params = in_thread_if_long(
            lambda: with_bad_word_ids(params, tokenizer), size=num_characters
        )
        return replace(decoding, params=params)

    def start(
        self,
        context: RequestContext,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        *,
        adapter: str,
        kept_special_ids: Collection[int] = (),
        images: tuple[PromptImage, ...] = (),
    ) -> list[Generation]:
        """Submit a request for each prompt's token ids to the engine. If one is refused, none runs.

        adapter: a name, or ''. kept_special_ids: the special tokens that stay in the answers' text.
        images: the images of the prompt; given only if there is a single prompt.

        Raises RequestError if a prompt is too long or has token ids that the model does not know.
        """
        tokenizer = self.prompting.tokenizer
        generations: list[Generation] = []
        turns = Turns()
        try:
            for prompt in prompts:
                turns.give()
                token_ids = decoding.params.truncated(prompt, self.client.facts.max_model_len)
                params = self._params(token_ids, decoding, images)
                submitted = context.record.now()
                connection = self.client.choose(context.session, token_ids, adapter)
                stream = connection.submit(token_ids, params, adapter, images)
                operation = decoding.dialect.operation
                context.record.submit(operation, adapter, params, len(token_ids), submitted)
                generations.append(
                    Generation(
                        stream,
                        Answers(params, tokenizer, token_ids, kept_special_ids=kept_special_ids),
                        decoding.dialect,
                        token_ids,
                        Deadline(context.has_hung_up, self.options.server.predict_timeout),
                        context.charge,
                        context.record,
                    )
                )
        except BaseException:
            for generation in generations:
                generation.abort("refused")
            raise
        return generations

    def send(
        self,
        context: RequestContext,
        response: ApiResponse,
        stream_format: StreamFormat,
    ) -> Response:
        """Return the HTTP response, after all tokens or, if streaming, after the first ones.

        No status is sent before that. So an earlier failure is raised, and the response gets the
        status of that failure.
        """
        try:
            if not response.stream:
                return json_response(response.document())
            records = response.records()
            first = next(records)
        except BaseException:
            response.abort()
            raise
        lines = stream_lines(response, chain([first], records), stream_format, context)
        streamed = Response(lines, content_type=MIMETYPES[stream_format])
        # A generator that never started runs no `finally`, so closing the response must abort.
        streamed.call_on_close(response.abort)
        return streamed

    def _params(
        self,
        prompt_token_ids: Sequence[int],
        decoding: Decoding,
        images: tuple[PromptImage, ...],
    ) -> SamplingParams:
        """Return the sampling parameters, with `max_tokens` resolved for this prompt.

        Raises RequestError that names the client's field.
        """
        params, dialect = decoding.params, decoding.dialect
        try:
            params = checked(
                prompt_token_ids, params, self.client.facts, images, prompt=dialect.prompt
            )
        except RequestError as error:
            raise dialect.error(error) from None
        if params.prompt_logprobs is not None:
            num_logprobs = len(prompt_token_ids) * (params.prompt_logprobs + 1)
            PROMPT_LOGPROBS.check(dialect.name("prompt_logprobs"), num_logprobs)
        return params


Start = Callable[[GenerationService, RequestContext, Mapping[str, object]], ApiResponse]
"""Starts to answer a body."""


def generates(start: Start, stream_format: StreamFormat) -> Callable[[GenerationService], Response]:
    """Return the answer of a route whose JSON bodies `start` starts to answer."""

    def answer(service: GenerationService) -> Response:
        context = request_context()
        return service.send(context, start(service, context, context.json_fields()), stream_format)

    return answer
