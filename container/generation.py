"""One request from its submission to its end: tokens in, texts out, and who ends it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from container.schemas.sampling import Decoding
from container.token_stream import TokenStream
from core.errors import GenerationError, LongshoreError, RequestError
from core.messages import Generated
from core.sampling import Finish
from core.stats import Timing
from core.text.answer import Answer, TokenText
from core.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
"""How often a waiting request looks whether its client is still there."""


class ClientGoneError(LongshoreError):
    """Nobody is left to answer."""


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
        *,
        has_hung_up: Callable[[], bool],
        timeout_s: float,
        keep: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep`: special tokens that are part of the text."""
        self.prompt_token_ids = prompt_token_ids
        self.timing: Timing | None = None
        """Once the engine has ended the answer; None where a stop text did."""
        self._dialect = decoding.dialect
        self._stream = stream
        self._has_hung_up = has_hung_up
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._look_due = clock() + LOOK_INTERVAL_S
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
                self.timing = generated.timing
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
        while True:
            self._check_client()
            left_s = self._deadline - self._clock()
            if left_s <= 0:
                raise GenerationError(
                    f"not finished within {self._timeout_s:g} s (option.predict_timeout)"
                )
            try:
                generated = self._stream.get(min(left_s, LOOK_INTERVAL_S))
            except RequestError as error:
                raise self._dialect.error(error) from None
            if generated is not None:
                return generated

    def _check_client(self) -> None:
        if self._clock() < self._look_due:
            return
        self._look_due = self._clock() + LOOK_INTERVAL_S
        if self._has_hung_up():
            raise ClientGoneError("the client has gone")
