"""Tokens to text one token at a time, never splitting a character.

A character may span several tokens, and a token's text may depend on the token before it
(SentencePiece drops a leading space). So a window of recent tokens is decoded again with each
new one, and what it adds is released once it ends in a whole character:

```
token_ids   ... | window_start ...... released ...... end |
text            |<-- already released -->|<-- new text -->|
```

The method of vLLM's and text-generation-inference's incremental detokenizers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from core.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 5
"""Tokens before the answer that can influence how its first token is written."""
MAX_INCOMPLETE_TOKENS = 3
"""A UTF-8 character has four bytes, so at most three tokens can wait for the rest of one."""


class Detokenizer:
    """The text of one answer. The texts that `push` and `flush` return are the whole answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        keep: Collection[int] = (),
    ) -> None:
        """spaces_between_special_tokens: False writes an added token that follows another one
        as it is, without what the tokenizer's decoder would put between them.

        keep: special tokens that are not skipped.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._keep = keep
        self._joins_added_tokens = not (skip_special_tokens or spaces_between_special_tokens)
        self._follows_added_token = False
        self._token_ids = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._window_start = 0
        self._released = len(self._token_ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; '' while a character is incomplete."""
        self._token_ids.append(token_id)
        end = len(self._token_ids)
        text = self._text_until(end)
        if self._joins_added_tokens:
            added = self._tokenizer.added_tokens.get(token_id)
            joined, self._follows_added_token = self._follows_added_token, added is not None
            if joined and added is not None:
                return self._release(added, end)
        if text.endswith(REPLACEMENT):
            # What may still become a character is among the newest tokens; what was before is not.
            end = max(self._released, end - MAX_INCOMPLETE_TOKENS)
            text = self._text_until(end)
        return self._release(text, end)

    def flush(self) -> str:
        """The text still held back at the end of an answer, incomplete as it is."""
        end = len(self._token_ids)
        return self._release(self._text_until(end), end)

    def _text_until(self, end: int) -> str:
        known = self._decode(self._window_start, self._released)
        return self._decode(self._window_start, end)[len(known) :]

    def _release(self, text: str, end: int) -> str:
        if text:
            self._window_start = self._released
        self._released = end
        return text

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(
            self._token_ids[start:end],
            skip_special_tokens=self._skip_special_tokens,
            keep=self._keep,
        )
