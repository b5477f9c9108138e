"""The model's tokenizer through the `tokenizers` library: 15 MiB and 0.1 s, no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._before = self.encode("a", add_special_tokens=False)[-1:]
        """Some token to stand before another one."""
        self._pieces: dict[int, str] = {}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """`max_tokens` keeps so many of the last ones, special tokens at the beginning included."""
        # NOTE: `encode` would hold the GIL, and with it every other thread, for all of a long text.
        if max_tokens is None:
            batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return batch[0].ids
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        num_added = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, max_tokens - num_added), direction="left")
        processed = self._tokenizer.post_process(encoding, None, add_special_tokens)
        return processed.ids[:max_tokens]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        keep: Collection[int] = (),
    ) -> str:
        """Bytes that form no character, as at a cut, become U+FFFD.

        `keep`: special tokens that are not skipped.
        """
        if skip_special_tokens and keep:
            token_ids = [each for each in token_ids if each in keep or not self.is_special(each)]
            skip_special_tokens = False
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str:
        """The text of one token inside a longer text, where a leading blank is kept."""
        if token_id not in self._pieces:
            before = self._before
            text = self.decode([*before, token_id], skip_special_tokens=False)
            begin = len(self.decode(before, skip_special_tokens=False))
            self._pieces[token_id] = text[begin:]
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a mark, such as the end of the text, and no text itself."""
        return token_id in self._special_ids

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; '' for an id that it lacks."""
        return self._tokenizer.id_to_token(token_id) or ""

    def ids_of(self, tokens: Iterable[str]) -> dict[str, int]:
        """The ids of those tokens that the vocabulary has."""
        ids = {token: self._tokenizer.token_to_id(token) for token in tokens}
        return {token: token_id for token, token_id in ids.items() if token_id is not None}


def tokenizer_file(model_dir: Path) -> Path:
    """The model's tokenizer.json. Raises ConfigurationError where there is none."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigurationError(
            f"{model_dir} has no tokenizer.json; make one with transformers: "
            f"AutoTokenizer.from_pretrained('{model_dir}').save_pretrained('{model_dir}')"
        )
    return path
