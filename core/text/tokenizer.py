"""The model's tokenizer, from the `tokenizers` library: 15 MiB and 0.1 s to load, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from core.errors import ConfigurationError
from core.foreign_code import contained

REPLACEMENT = "\ufffd"
"""Stands for bytes that form no complete character."""
_MAX_DECODED_WITH_GIL = 4096
"""Longer runs of tokens are decoded without the GIL."""
_JOINING_DECODERS = (
    ["ByteLevel"],
    ["Replace", "ByteFallback", "Fuse"],
    ["Replace", "ByteFallback", "Fuse", "Strip"],
)
"""Decoders that join the texts of tokens, once each character is complete. The last one also drops
the space with which a text begins."""


class Tokenizer:
    """Converts text to token ids and back. Safe to share between threads."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigurationError if the directory has no tokenizer.json."""
        self.model_dir = model_dir
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file(model_dir)))
        # The file may set truncation or padding for training. Serving needs neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added: Mapping[int, tokenizers.AddedToken] = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        """Maps the ids of added tokens, including special tokens, to their text."""
        self.special_ids = {token_id for token_id, token in added.items() if token.special}
        """Special tokens, such as an end-of-sequence token."""
        self._before = self.encode("a", add_special_tokens=False)[-1:]
        """A token to decode before another one (see `piece`)."""
        self._pieces: dict[int, str] = {}
        self.own_texts: Mapping[int, str] = _OwnTexts(self, joins=self._joins())
        """By id, the text that a token adds to any text that ends in a complete character. '' for
        tokens whose text depends on others, such as parts of characters."""

    @cached_property
    def max_token_characters(self) -> int:
        """The number of characters of the longest token. Takes 0.1 s for a large vocabulary."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        max_tokens: keep only this many tokens from the end, including special tokens.
        """
        with contained:
            if max_tokens is not None:
                return self._encode_end(text, add_special_tokens, max_tokens)
            # NOTE: `encode` holds the GIL throughout, which blocks all threads during a long text.
            batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return batch[0].ids

    def _encode_end(self, text: str, add_special_tokens: bool, max_tokens: int) -> list[int]:
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        num_added = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, max_tokens - num_added), direction="left")
        processed = self._tokenizer.post_process(encoding, None, add_special_tokens)
        return processed.ids[:max_tokens]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens. Bytes that form no complete character become U+FFFD."""
        with contained:
            if len(token_ids) > _MAX_DECODED_WITH_GIL:
                return self._decode_without_gil(token_ids, skip_special_tokens)
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _decode_without_gil(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return what `decode` of the library returns, which is quicker but holds the GIL."""
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def piece(self, token_id: int) -> str:
        """Return the text of one token inside a longer text, where leading spaces are kept."""
        if token_id not in self._pieces:
            before = self._before
            text = self.decode([*before, token_id], skip_special_tokens=False)
            begin = len(self.decode(before, skip_special_tokens=False))
            self._pieces[token_id] = text[begin:]
        return self._pieces[token_id]

    def token(self, token_id: int) -> str:
        """Return the token as spelled in the vocabulary; '' for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def ids_of(self, tokens: Iterable[str]) -> dict[str, int]:
        """Return the ids of those tokens that are in the vocabulary."""
        ids = {token: self._tokenizer.token_to_id(token) for token in tokens}
        return {token: token_id for token, token_id in ids.items() if token_id is not None}

    def _joins(self) -> bool:
        """Whether the text of tokens is that of each, joined, apart from incomplete characters."""
        decoder = self._tokenizer.decoder
        if decoder is None or not self._before:
            return False
        state = json.loads(decoder.__getstate__())
        parts = state["decoders"] if state["type"] == "Sequence" else [state]
        return [part["type"] for part in parts] in _JOINING_DECODERS


class _OwnTexts(dict[int, str]):
    """Texts of tokens, found when they are first looked up."""

    def __init__(self, tokenizer: Tokenizer, *, joins: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._joins = joins

    def __missing__(self, token_id: int) -> str:
        self[token_id] = text = self._text(token_id) if self._joins else ""
        return text

    def _text(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        if token_id in tokenizer.added_tokens or not tokenizer.token(token_id):
            return ""
        piece = tokenizer.piece(token_id)
        return "" if REPLACEMENT in piece else piece


def tokenizer_file(model_dir: Path) -> Path:
    """Return the path of tokenizer.json. Raises ConfigurationError if it does not exist."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigurationError(
            f"{model_dir} has no tokenizer.json; create it with transformers: "
            f"AutoTokenizer.from_pretrained('{model_dir}').save_pretrained('{model_dir}')"
        )
    return path
