"""Converts texts to token ids and back, without blocking the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from container.http.off_loop import in_thread_if_long
from core.configuration.limits import TEXT_CHARACTERS
from core.errors import RequestError
from core.request_check import too_long
from core.text.tokenizer import Tokenizer


class Prompting:
    """Encodes and decodes prompts with the model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: Callable[[], int]) -> None:
        """max_model_len: returns the maximum tokens of a sequence, once the engine is ready."""
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len

    def check_length(self, text: str, field: str) -> None:
        """Raise RequestError, naming `field`, if the text has too many characters.

        That is so if the model could not take it however long its tokens are, or if it is longer
        than TEXT_CHARACTERS allows.
        """
        max_model_len = self._max_model_len()
        if len(text) > max_model_len:
            self._check_long_text(text, field, max_model_len)

    def _check_long_text(self, text: str, field: str, max_model_len: int) -> None:
        longest = self.tokenizer.max_token_characters
        if len(text) > max_model_len * longest:
            raise RequestError(
                field,
                f"{too_long(max_model_len)}, and a token has at most {longest} characters, so a "
                f"text of {len(text):,} characters does not fit",
            )
        TEXT_CHARACTERS.check(field, len(text))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the text's token ids, the last `max_tokens` if that is given.

        Pass only a text that `check_length` accepts.
        """
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        encode = partial(encode, max_tokens=max_tokens)
        return in_thread_if_long(lambda: encode(text), size=len(text))

    def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each text, as `encode` does."""
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        encode = partial(encode, max_tokens=max_tokens)
        return in_thread_if_long(lambda: [*map(encode, texts)], size=sum(map(len, texts)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""

        def decode() -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return in_thread_if_long(decode, size=len(token_ids))
