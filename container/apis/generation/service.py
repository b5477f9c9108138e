"""The service of the routes for models that generate text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
from flask import Response

from container.apis.generation.generations import Generations
from container.apis.generation.prompting import Prompting
from container.apis.generation.rendering import Conversations
from container.apis.generation.reply import ApiResponse
from container.apis.generation.sampling import Decoding
from container.apis.generation.stream import StreamFormat, send
from container.apis.model_choice import model_choice
from container.http.off_loop import in_thread_if_long
from container.http.request_context import RequestContext, request_context
from container.http.route import Contract
from container.http.service import Service
from container.isolation.helper import Helper
from container.wire.engine_client import EngineClient
from core.configuration.limits import BAD_WORDS_CHARACTERS
from core.configuration.options import Options
from core.text.bad_words import with_bad_word_ids
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer


class GenerationService(Service):
    """Adds what text generation needs: prompts, and generations."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        helper: Helper,
        options: Options,
        model_name: str,
        contract: Contract,
    ) -> None:
        """helper: has the source of the same template."""
        super().__init__(client, options, model_name, contract)
        self.prompting = Prompting(tokenizer, lambda: client.facts.max_model_len)
        self.generations = Generations(
            client,
            self.prompting,
            _Preparation(client, tokenizer, helper),
            model_choice(model_name, options),
            options.server.predict_timeout,
        )
        self.conversations = Conversations(self.prompting, template, helper, lambda: client.facts)


class _Preparation:
    """Turns decodings into what the engine takes."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, helper: Helper) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._helper = helper

    def __call__(self, decoding: Decoding) -> Decoding:
        """Return the decoding with its format as a grammar, and the tokens of bad words.

        Raises RequestError if the structured outputs are invalid or too complex, or if the bad
        words are too long.
        """
        if decoding.params.structured_outputs is not None:
            decoding = self._with_grammar(decoding)
        if decoding.params.bad_words:
            decoding = self._with_bad_words(decoding)
        return decoding

    def _with_grammar(self, decoding: Decoding) -> Decoding:
        params = decoding.params
        assert params.structured_outputs is not None
        with decoding.dialect.names_errors():
            grammar = self._helper.grammar(
                params.structured_outputs, self._client.facts.eos_token_ids
            )
        return replace(decoding, params=msgspec.structs.replace(params, structured_outputs=grammar))

    def _with_bad_words(self, decoding: Decoding) -> Decoding:
        num_characters = sum(map(len, decoding.params.bad_words))
        BAD_WORDS_CHARACTERS.check(decoding.dialect.name("bad_words"), num_characters)
        params = in_thread_if_long(
            lambda: with_bad_word_ids(decoding.params, self._tokenizer), size=num_characters
        )
        return replace(decoding, params=params)


Start = Callable[[GenerationService, RequestContext, Mapping[str, object]], ApiResponse]
"""Starts to answer a body."""


def generates(start: Start, stream_format: StreamFormat) -> Callable[[GenerationService], Response]:
    """Return the answer of a route whose JSON bodies `start` starts to answer."""

    def answer(service: GenerationService) -> Response:
        context = request_context()
        return send(context, start(service, context, context.json_fields()), stream_format)

    return answer
