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

from collections.abc import Sequence

from core.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 5
"""Tokens before the answer that can influence how its first token is written."""
MAX_HELD_TOKENS = 4
"""A UTF-8 character has four bytes; text that ends in U+FFFD for longer is truly invalid."""


class Detokenizer:
    """The text of one answer. The texts that `push` and `flush` return are the whole answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._window_start = 0
        self._released = len(self._token_ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; '' while a character is incomplete."""
        self._token_ids.append(token_id)
        text = self._unreleased_text()
        num_held = len(self._token_ids) - self._released
        if text.endswith(REPLACEMENT) and num_held <= MAX_HELD_TOKENS:
            return ""
        return self._release(text)

    def flush(self) -> str:
        """The text still held back at the end of an answer, incomplete as it is."""
        return self._release(self._unreleased_text())

    def _unreleased_text(self) -> str:
        known = self._decode(self._window_start, self._released)
        return self._decode(self._window_start, len(self._token_ids))[len(known) :]

    def _release(self, text: str) -> str:
        if text:
            self._window_start = self._released
            self._released = len(self._token_ids)
        return text

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(
            self._token_ids[start:end], skip_special_tokens=self._skip_special_tokens
        )
