"""The model's tokenizer through the `tokenizers` library: 15 MiB and 0.1 s, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from core.errors import ConfigurationError


class Tokenizer:
    """Text to token ids and back. Safe to share between threads."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigurationError where the directory has no tokenizer.json."""
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file(model_dir)))
        # A file may carry the truncation or padding of its training; serving wants neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added: Mapping[int, tokenizers.AddedToken] = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        """Token id → text of those beside the vocabulary proper, special ones among them."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # NOTE: `encode` would hold the GIL, and with it every other thread, for all of a long text.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that form no character, as at a cut, become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def tokenizer_file(model_dir: Path) -> Path:
    """The model's tokenizer.json. Raises ConfigurationError where there is none."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigurationError(
            f"{model_dir} has no tokenizer.json; make one with transformers: "
            f"AutoTokenizer.from_pretrained('{model_dir}').save_pretrained('{model_dir}')"
        )
    return path
