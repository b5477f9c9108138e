"""One request from its submission to its end: tokens in, texts out, and who ends it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from container.patience import Patience
from container.schemas.sampling import Decoding
from container.token_stream import TokenStream
from core.errors import RequestError
from core.messages import Generated
from core.sampling import Finish
from core.text.answer import Answer, TokenText
from core.text.tokenizer import Tokenizer


class Generation:
    """A running request.

    However it ends (by itself, at a stop text, late, or because its client went away), the
    engine has stopped working on it once `batches` is exhausted, raises or is closed.
    """

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: Tokenizer,
        decoding: Decoding,
        prompt_token_ids: Sequence[int],
        patience: Patience,
        *,
        keep: Collection[int] = (),
    ) -> None:
        """`keep`: special tokens that are part of the text."""
        self.prompt_token_ids = prompt_token_ids
        self._dialect = decoding.dialect
        self._stream = stream
        self._patience = patience
        self._answer = Answer.of(decoding.params, tokenizer, prompt_token_ids, keep=keep)

    @property
    def tokens(self) -> Sequence[TokenText]:
        """All tokens so far."""
        return self._answer.tokens

    @property
    def finish(self) -> Finish | None:
        """Set once the answer is whole."""
        return self._answer.finish

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._answer.text

    def batches(self) -> Iterator[list[TokenText]]:
        """New tokens as they come, several at once where they came faster than they were taken.

        Raises RequestError, OverloadedError, GenerationError or ClientGoneError.
        """
        try:
            while self._answer.finish is None:
                generated = self._next()
                yield self._answer.push(generated.token_ids, generated.logprobs, generated.finish)
        finally:
            self.abort()

    def run(self) -> None:
        """Waits for the whole answer. Raises what `batches` raises."""
        for _ in self.batches():
            pass

    def abort(self) -> None:
        """Has the engine stop; harmless after the end."""
        self._stream.abort()

    def _next(self) -> Generated:
        try:
            return self._patience.wait(self._stream.get)
        except RequestError as error:
            raise self._dialect.error(error) from None
