"""One request from its submission to its end: tokens in, answers out, and who ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from container.apis.generation.sampling import Dialect
from container.http.patience import Patience
from container.wire.token_stream import TokenStream
from core.errors import RequestError
from core.messages import Generated
from core.sampling import TopLogprobs
from core.stats import Timing
from core.text.answer import Answer
from core.text.answers import Answers, News


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
        patience: Patience,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.timing: Timing | None = None
        """Of the answer that ended last; None where a stop text ended it."""
        self._stream = stream
        self._answers = answers
        self._dialect = dialect
        self._patience = patience

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
                    self.timing = generated.timing
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
        try:
            return self._patience.wait(lambda timeout_s: self._stream.get(timeout_s) or None)
        except RequestError as error:
            raise self._dialect.error(error) from None
