"""Finds the tokens of the words that an answer must not contain."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from core.sampling import SamplingParams
from core.text.tokenizer import Tokenizer


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters with the texts in `bad_words` replaced by their tokens.

    A word may have other tokens after a space than at the start of the answer. As in vLLM, the
    tokens of the word with a space are forbidden too if they are as many as those of the plain
    word, and begin with a different token.
    """
    if not any(isinstance(word, str) for word in params.bad_words):
        return params
    words: list[tuple[int, ...]] = []
    for word in params.bad_words:
        words += _spellings(word, tokenizer) if isinstance(word, str) else [word]
    return msgspec.structs.replace(params, bad_words=tuple(words))


def _spellings(word: str, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    word = word.lstrip() or word
    plain, spaced = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")
    )
    if not plain:
        return []
    forbids_both = len(spaced) == len(plain) and spaced[0] != plain[0]
    return [plain, spaced] if forbids_both else [plain]
