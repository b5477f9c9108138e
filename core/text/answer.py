"""The text of one answer as its tokens arrive: detokenization, stop texts, the finish reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from core.sampling import Finish
from core.text.detokenizer import Detokenizer
from core.text.stopping import StopTexts
from core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenText:
    """One generated token and the text that became certain with it.

    The texts of all tokens of an answer together are the answer: a token that only begins a
    character, or may begin a stop text, has '' and its text comes with a later one.
    """

    id: int
    text: str
    logprob: float


class Answer:
    """Collects one answer. `finish` is set when it has ended; push nothing after that."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        keep: Collection[int] = (),
        include_stop: bool = False,
    ) -> None:
        """`keep`: special tokens that are not skipped; `include_stop`: the stop text is not cut."""
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens, keep=keep
        )
        self._stop = StopTexts(stop, include=include_stop)
        self.tokens: list[TokenText] = []
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish: Finish | None = None,
    ) -> list[TokenText]:
        """Takes new tokens in; returns them with their texts.

        Tokens after a stop text are dropped; `self.finish` is then Finish.STOP, and the engine
        must be told to abort unless `finish` says that it ended by itself.
        """
        new: list[TokenText] = []
        for position, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1):
            is_last = finish is not None and position == len(token_ids)
            text = self._text_of(token_id, is_last)
            new.append(TokenText(token_id, text, logprob))
            if self._stop.reached:
                break
        self.tokens += new
        self.finish = Finish.STOP if self._stop.reached else finish
        return new

    def _text_of(self, token_id: int, is_last: bool) -> str:
        text = self._detokenizer.push(token_id)
        if is_last:
            text += self._detokenizer.flush()
        released = self._stop.push(text)
        return released + self._stop.flush() if is_last else released
