"""The text of one answer as its tokens arrive: detokenization, stop strings, finish reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from core.output import Output
from core.sampling import Finish, SamplingParams, TopLogprobs
from core.text.detokenizer import Detokenizer, JoiningDetokenizer
from core.text.stopping import StopStrings
from core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenText:
    """One generated token and the text that it completes.

    The texts of all tokens, joined, are the answer. An incomplete character, and text that may be
    the start of a stop string, come with a later token.
    """

    id: int
    text: str
    logprob: float
    top_logprobs: TopLogprobs | None = None
    """Set if the request has `logprobs`."""


class AnswerText:
    """Collects the tokens of one answer. Once `finish` is set, push nothing more."""

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int] = (),
        *,
        kept_special_ids: Collection[int] = (),
    ) -> None:
        """Without a tokenizer, the answer has no text.

        kept_special_ids: special tokens that are not skipped.
        """
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            skips = params.skip_special_tokens
            has_spaces = skips or params.spaces_between_special_tokens
            self._detokenizer = (Detokenizer if has_spaces else JoiningDetokenizer)(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=skips,
                kept_special_ids=kept_special_ids,
            )
        self._stop = StopStrings(
            params.stop_strings, includes_stop=params.include_stop_str_in_output
        )
        self._min_tokens = params.min_tokens
        self.tokens: list[TokenText] = []
        self.finish: Finish | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer; None if something else did."""
        return self._stop.found

    @property
    def stop_reason(self) -> str | int | None:
        """The cause of the end, as in vLLM: the stop string, or the id of a stop token that the
        request names. None for other causes, such as the model's own end-of-sequence token."""
        if self.finish != Finish.STOP:
            return None
        return self.tokens[-1].id if self.stop_string is None else self.stop_string

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the logprobs of all tokens, in nats."""
        return sum(token.logprob for token in self.tokens)

    def push(self, output: Output) -> list[TokenText]:
        """Add the tokens of an output of this answer, and return them with their texts.

        At a stop string, drops the tokens after it and sets `self.finish` to Finish.STOP. The
        caller must then abort the answer in the engine, unless the output has `finish`: the engine
        has already ended the answer then.
        """
        new: list[TokenText] = []
        pairs = enumerate(zip(output.token_ids, output.logprobs, strict=True), 1)
        for (position, (token_id, logprob)), best in zip_longest(pairs, output.top_logprobs):
            is_last = output.finish is not None and position == len(output.token_ids)
            is_exempt = len(self.tokens) + position <= self._min_tokens
            text = self._text_of(token_id, is_last, is_exempt)
            new.append(TokenText(token_id, text, logprob, best))
            if self._stop.is_reached:
                break
        self.tokens += new
        self.finish = Finish.STOP if self._stop.is_reached else output.finish
        return new

    def _text_of(self, token_id: int, is_last: bool, is_exempt: bool) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(token_id)
        if is_last:
            text += self._detokenizer.flush()
        released = self._stop.push(text, is_exempt=is_exempt)
        return released + self._stop.flush() if is_last else released
