"""What every API of text generation does alike: start a generation, send an answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

import msgspec
from flask import Response, g, request

from container.apis.generation.answer import Answer
from container.apis.generation.formatted import FormattedAnswer
from container.apis.generation.formatters import Formatters
from container.apis.generation.generation import Generation
from container.apis.generation.prompting import Prompting, beside_the_loop
from container.apis.generation.sampling import Decoding
from container.apis.generation.stream import MIMETYPES, StreamFormat, stream_lines
from container.http.disconnect import disconnect_check
from container.http.host import Host, json_response
from container.http.patience import Patience
from container.wire.engine_client import EngineClient
from core.errors import RequestError
from core.options import Options
from core.sampling import SamplingParams
from core.text.answers import Answers
from core.text.bad_words import with_bad_word_ids
from core.text.grammar import checked

ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


class Service(Host):
    """A host that generates."""

    def __init__(
        self,
        client: EngineClient,
        prompting: Prompting,
        options: Options,
        model_name: str,
        formatters: Formatters | None = None,
    ) -> None:
        """`formatters` are the user's own, for the requests of all that use this service."""
        super().__init__(client, options, model_name)
        self.prompting = prompting
        self._formatters = formatters

    def read(self) -> dict[str, object]:
        """The fields of a body of any served type. Raises GenerationError of a formatter."""
        body = super().read()
        return body if self._formatters is None else self._formatters.request(body)

    def adapter(self, named: str | None, model: object = None) -> str:
        """The adapter to answer the current request with, '' for none: the one `named` in its
        body, or by SageMaker's header, or by OpenAI's `model` where that is not the model's own.

        Whether it is loaded is for the engine to say. Raises RequestError where none can be.
        """
        by_header = request.headers.get(ADAPTER_HEADER)
        if not self.options.enable_lora:
            for field, value in (("adapters", named), (ADAPTER_HEADER, by_header)):
                if value:
                    raise RequestError(field, "needs option.enable_lora=true")
            return ""
        if named is not None:
            return named
        if by_header or model is None or model == self.model_name:
            return by_header or ""
        if not isinstance(model, str):
            raise RequestError("model", "expected a text")
        return model

    def checked(self, decoding: Decoding) -> Decoding:
        """The same with a form of the answer as a grammar that is known to be right.

        Raises RequestError where there is none.
        """
        params, dialect = decoding.params, decoding.dialect
        form = params.structured_outputs
        if form is None:
            return decoding
        try:
            grammar = beside_the_loop(lambda: checked(form), size=len(request.get_data()))
        except RequestError as error:
            raise dialect.error(error) from None
        params = msgspec.structs.replace(params, structured_outputs=grammar)
        return replace(decoding, params=params)

    def start(
        self,
        prompt_token_ids: Sequence[int],
        decoding: Decoding,
        *,
        keep: Collection[int] = (),
        adapter: str = "",
    ) -> Generation:
        """Submits a prompt. Raises RequestError where it is too long, or not of this model.

        `keep`: special tokens that are part of the answers' text. `adapter`: '' for none.
        """
        tokenizer = self.prompting.tokenizer
        params = with_bad_word_ids(self._params(prompt_token_ids, decoding), tokenizer)
        return Generation(
            self.client.submit(prompt_token_ids, params, adapter),
            Answers(params, tokenizer, prompt_token_ids, keep=keep),
            decoding.dialect,
            prompt_token_ids,
            Patience(disconnect_check(request.environ), self.options.predict_timeout),
        )

    def start_all(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, adapter: str
    ) -> list[Generation]:
        """Submits all of them, or none. Raises what `start` raises."""
        generations: list[Generation] = []
        try:
            for prompt_token_ids in prompts:
                generations.append(self.start(prompt_token_ids, decoding, adapter=adapter))
        except BaseException:
            for generation in generations:
                generation.abort()
            raise
        return generations

    def respond(self, answer: Answer, *, stream: bool, form: StreamFormat) -> Response:
        """Sends the answer; what goes wrong before the first token raises."""
        if self._formatters is not None:
            answer = FormattedAnswer(answer, self._formatters)
        try:
            return self._streamed(answer, form) if stream else json_response(answer.whole())
        except BaseException:
            answer.abort()
            raise

    def _params(self, prompt_token_ids: Sequence[int], decoding: Decoding) -> SamplingParams:
        """The engine would refuse these as well, but could not name what the client wrote."""
        facts, dialect = self.client.facts, decoding.dialect
        num_tokens, limit = len(prompt_token_ids), facts.max_model_len
        if num_tokens == 0:
            raise RequestError(dialect.prompt, "has no tokens")
        if not all(0 <= each < facts.vocab_size for each in prompt_token_ids):
            raise RequestError(dialect.prompt, f"token ids are 0 to {facts.vocab_size - 1}")
        left = limit - num_tokens
        if left < 1:
            raise RequestError(
                dialect.prompt,
                f"{num_tokens} tokens leave no room for an answer: prompt and answer together "
                f"may have {limit} (option.max_model_len)",
            )
        if decoding.fills_context:
            return msgspec.structs.replace(decoding.params, max_tokens=left)
        if decoding.params.max_tokens > left:
            raise RequestError(
                dialect.name("max_tokens"),
                f"{decoding.params.max_tokens} is more than the {left} that are left: "
                f"{dialect.prompt} has {num_tokens} tokens, and prompt and answer together may "
                f"have {limit} (option.max_model_len)",
            )
        return decoding.params

    def _streamed(self, answer: Answer, form: StreamFormat) -> Response:
        """No status is sent before the first token, so that an early failure has its own."""
        pieces = answer.pieces()
        first = next(pieces)
        lines = stream_lines(answer, chain([first], pieces), form, g.request_id)
        response = Response(lines, content_type=MIMETYPES[form])
        # A generator that never started has no `finally` to run, so the response sees to it.
        response.call_on_close(answer.abort)
        return response
