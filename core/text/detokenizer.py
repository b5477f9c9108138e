"""Incremental detokenization that never splits a character.

A character may span several tokens, and a token's text may depend on the token before it
(SentencePiece drops a leading space). So a window of recent tokens is decoded again with each
new one, and the new text is released once it ends in a complete character (most tokens need no
window, see `Tokenizer.own_texts`):

```
token_ids   ... | window_start ...... released ...... end |
text            |<-- already released -->|<-- new text -->|
```

vLLM and text-generation-inference use the same method.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from core.sampling import SamplingParams
from core.text.tokenizer import REPLACEMENT, Tokenizer

NUM_CONTEXT_TOKENS = 5
"""How many tokens from the prompt's end the first window has: they can affect the text of the
answer's first token."""
MAX_INCOMPLETE_TOKENS = 3
"""A UTF-8 character has up to four bytes, so at most three tokens can wait for its last byte."""


class Detokenizer:
    """Decodes one answer. The texts that `push` and `flush` return, joined, are the answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skipped: Collection[int] = frozenset(),
    ) -> None:
        """Decode after the given prompt, without the tokens in `skipped`."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        context = prompt_token_ids[-NUM_CONTEXT_TOKENS:]
        self._token_ids = [token_id for token_id in context if token_id not in skipped]
        self._window_start = 0
        self._released = len(self._token_ids)
        self._own_texts = tokenizer.own_texts
        self._is_complete = False
        """Whether all tokens are released, and their text ends in a complete character."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes; '' while a character is incomplete."""
        if token_id in self._skipped:
            return ""  # it stays out of the window, which moves on only when text is released
        if self._is_complete and (text := self._own_texts[token_id]):
            self._token_ids.append(token_id)
            return self._release(text, len(self._token_ids))
        if not self._tokenizer.token(token_id):
            return ""  # unknown
        self._token_ids.append(token_id)
        return self._newest_text()

    def flush(self) -> str:
        """Return the text still held back at the end of an answer, even if incomplete."""
        end = len(self._token_ids)
        return self._release(self._text_until(end), end)

    def _newest_text(self) -> str:
        """Return the text that the newest token completes."""
        end = len(self._token_ids)
        text = self._text_until(end)
        if text.endswith(REPLACEMENT):
            # Only the newest tokens can still be an incomplete character; release all before them.
            end = max(self._released, end - MAX_INCOMPLETE_TOKENS)
            text = self._text_until(end)
        return self._release(text, end)

    def _text_until(self, end: int) -> str:
        known = self._decode(self._window_start, self._released)
        return self._decode(self._window_start, end)[len(known) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=False)

    def _release(self, text: str, end: int) -> str:
        if text:
            self._window_start = self._released
        self._released = end
        is_whole = bool(text) and not text.endswith(REPLACEMENT)
        self._is_complete = is_whole and end == len(self._token_ids)
        return text


class JoiningDetokenizer(Detokenizer):
    """Leaves out the space that the tokenizer's decoder puts between adjacent added tokens."""

    _follows_added_token = False

    def _newest_text(self) -> str:
        added = self._tokenizer.added_tokens.get(self._token_ids[-1])
        joined, self._follows_added_token = self._follows_added_token, added is not None
        if joined and added is not None:
            return self._release(added, len(self._token_ids))
        return super()._newest_text()

    def _release(self, text: str, end: int) -> str:
        super()._release(text, end)
        self._is_complete = False  # so that every token passes through `_newest_text`
        return text


@dataclass(frozen=True, slots=True)
class Detokenization:
    """How the tokens of the answers to one request become text."""

    params: SamplingParams
    tokenizer: Tokenizer | None
    """Without a tokenizer, answers have no text."""
    prompt_token_ids: Sequence[int] = ()
    kept_special_ids: Collection[int] = ()
    """Special tokens that are not skipped."""

    def begin(self) -> Detokenizer | None:
        """Return a detokenizer for one answer; None if the answer has no text."""
        params, tokenizer = self.params, self.tokenizer
        if tokenizer is None or not params.detokenize:
            return None
        skips = params.skip_special_tokens
        skipped = tokenizer.special_ids.difference(self.kept_special_ids) if skips else ()
        has_spaces = skips or params.spaces_between_special_tokens
        kind = Detokenizer if has_spaces else JoiningDetokenizer
        return kind(tokenizer, self.prompt_token_ids, skipped)
