"""One request from its submission to its end: tokens in, answers out, and who ends it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from container.schemas.sampling import Dialect
from container.token_stream import TokenStream
from core.errors import GenerationError, LongshoreError, RequestError
from core.messages import Generated
from core.sampling import TopLogprobs
from core.text.answer import Answer
from core.text.answers import Answers, News

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
"""How often a waiting request looks whether its client is still there."""


class ClientGoneError(LongshoreError):
    """Nobody is left to answer."""


class Generation:
    """A running request.

    However it ends (by itself, at stop texts, late, or because its client went away), the
    engine has stopped working on it once `news` is exhausted, raises or is closed.
    """

    def __init__(
        self,
        stream: TokenStream,
        answers: Answers,
        dialect: Dialect,
        prompt_token_ids: Sequence[int],
        *,
        has_hung_up: Callable[[], bool],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self._stream = stream
        self._answers = answers
        self._dialect = dialect
        self._has_hung_up = has_hung_up
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._look_due = clock() + LOOK_INTERVAL_S

    @property
    def answers(self) -> Sequence[Answer]:
        """Those that are told, so far."""
        return self._answers.told

    @property
    def num_generated_tokens(self) -> int:
        """Of all answers, also of those that are not told (`best_of`)."""
        return self._answers.num_tokens

    @property
    def prompt_scores(self) -> Sequence[TopLogprobs]:
        """Of the prompt's tokens from the second on, where `prompt_logprobs` is asked for."""
        return self._answers.prompt_scores

    def news(self) -> Iterator[News]:
        """New tokens as they come, several at once where they came faster than they were taken.

        Raises RequestError, OverloadedError, GenerationError or ClientGoneError.
        """
        try:
            while self._answers.num_open:
                for generated in self._next():
                    news = self._answers.push(generated)
                    if self._answers.stopped_by_text(generated):
                        self._stream.abort(generated.index)
                    yield from news
        finally:
            self.abort()

    def run(self) -> None:
        """Waits for all answers. Raises what `news` raises."""
        for _ in self.news():
            pass

    def abort(self) -> None:
        """Has the engine stop; harmless after the end."""
        self._stream.abort()

    def _next(self) -> list[Generated]:
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
            if generated:
                return generated

    def _check_client(self) -> None:
        if self._clock() < self._look_due:
            return
        self._look_due = self._clock() + LOOK_INTERVAL_S
        if self._has_hung_up():
            raise ClientGoneError("the client has gone")
