"""Starts the generations of all text generation APIs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

from container.apis.generation.generation import Generation
from container.apis.generation.prompting import Prompting
from container.apis.generation.sampling import Decoding
from container.http.deadline import Deadline
from container.http.request_context import DIGEST_HEADER, RequestContext
from core.protocol.facts import Facts
from core.protocol.messages import EncodedPrompt, Submit
from core.request_check import checked
from core.text.answers import answers_to
from core.text.detokenizer import Detokenization

if TYPE_CHECKING:
    from container.wire.token_stream import TokenStream


class Engines(Protocol):
    """The engines that generate, as `EngineClient` reaches them."""

    @property
    def facts(self) -> Facts:
        """Raises EngineUnavailableError while no engine is ready."""
        ...

    def digest(self, variant: str) -> str:
        """Return the digest of what may change the bits of answers; '' if it is unknown."""
        ...

    def submit(self, request: Submit, session: str | None) -> TokenStream:
        """Start a request, whose id does not matter, on the engine that suits it best."""
        ...


class Generations:
    """Everything between an API's checked request and the engine, for models that generate."""

    def __init__(
        self,
        engines: Engines,
        prompting: Prompting,
        prepare: Callable[[Decoding], Decoding],
        choose_variant: Callable[[RequestContext, str | None, object], str],
        timeout_s: float,
    ) -> None:
        """prepare: turns a decoding into what engines take. choose_variant: names the variant of
        the model for a request, from what the body names and from its `model`.
        """
        self.prompting = prompting
        self.prepare = prepare
        self.choose_variant = choose_variant
        self._engines = engines
        self._timeout_s = timeout_s

    def start(
        self,
        context: RequestContext,
        prompt: EncodedPrompt,
        decoding: Decoding,
        *,
        variant: str,
        kept_special_ids: Collection[int] = (),
    ) -> Generation:
        """Submit a request for the prompt to the engine.

        variant: a name, or ''. kept_special_ids: the special tokens that stay in the answers' text.

        Raises RequestError if the prompt is too long or has token ids that the model does not know.
        """
        facts = self._engines.facts
        token_ids = decoding.params.truncated(prompt.token_ids, facts.max_model_len)
        with decoding.dialect.names_errors():
            params = checked(token_ids, decoding.params, facts, prompt=decoding.dialect.prompt)
            prompt.check(params, facts)
        decoding.check_result(len(token_ids))
        submitted = context.record.now()
        request = Submit.of(prompt, token_ids, params, variant, context.api_key)
        if digest := self._engines.digest(variant):
            context.response_headers[DIGEST_HEADER] = digest
        stream = self._engines.submit(request, context.session)
        context.record.submit(decoding.dialect.operation, request, submitted)
        tokenizer = self.prompting.tokenizer
        answers = answers_to(Detokenization(params, tokenizer, token_ids, kept_special_ids))
        deadline = Deadline(context.has_hung_up, self._timeout_s)
        return Generation(context, stream, answers, decoding.dialect, token_ids, deadline)
