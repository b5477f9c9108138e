"""The text of one answer as its tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import msgspec

from core.output import Output
from core.sampling import Finish, TopLogprobs
from core.text.detokenizer import Detokenization


class TokenText(msgspec.Struct, frozen=True, gc=False):
    """One generated token and the text that it completes.

    The texts of all tokens, joined, are the answer. An incomplete character, and text that may be
    the start of a stop string, come with a later token.
    """

    id: int
    text: str
    logprob: float
    top_logprobs: TopLogprobs | None = None
    """Set if the request has `logprobs`."""


def text_of(tokens: Iterable[TokenText]) -> str:
    """Return the text that the tokens complete."""
    return "".join([token.text for token in tokens])


class AnswerText:
    """Collects the tokens of one answer. Once `finish` is set, push nothing more.

    If the request has stop strings, use `core.text.stopping.StoppableAnswer`.
    """

    def __init__(self, detokenization: Detokenization) -> None:
        self._detokenizer = detokenization.begin()
        self.tokens: list[TokenText] = []
        self.finish: Finish | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer; None if something else did."""
        return None

    @property
    def stop_reason(self) -> str | int | None:
        """The cause of the end, as in vLLM: the stop string, or the id of a stop token that the
        request names. None for other causes, such as the model's own end-of-sequence token."""
        if self.finish != Finish.STOP:
            return None
        return self.tokens[-1].id if self.stop_string is None else self.stop_string

    @property
    def text(self) -> str:
        return text_of(self.tokens)

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the logprobs of all tokens, in nats."""
        return sum(token.logprob for token in self.tokens)

    def push(self, output: Output) -> list[TokenText]:
        """Add the tokens of an output of this answer, and return them with their texts."""
        new: list[TokenText] = []
        num_before_last = len(output.token_ids) - 1 if output.finish is not None else -1
        best = output.top_logprobs or repeat(None)
        for token_id, logprob, top in zip(output.token_ids, output.logprobs, best, strict=False):
            text = self._text_of(token_id, len(new) == num_before_last)
            new.append(TokenText(token_id, text, logprob, top))
            if self.finish is not None:  # at a stop string
                break
        self.tokens += new
        self.finish = self.finish or output.finish
        return new

    def _text_of(self, token_id: int, is_last: bool) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(token_id)
        return text + self._detokenizer.flush() if is_last else text
