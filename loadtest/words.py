"""Prompts of a wanted number of tokens, without the model's tokenizer."""

from __future__ import annotations

import random

_TEXT = (
    "the and of to a in that it is was I for on you he be with as by at have are this not but had "
    "his they from she which or we an there her were one do all their has would will what if can "
    "when so no said who more about up out them some"
)
COMMON = tuple(_TEXT.split())
"""Each of them is a single token, with the space before it, in nearly every vocabulary."""


class Words:
    """Random common words. `tokens_per_word` is what the server at hand makes of them."""

    def __init__(self, tokens_per_word: float = 1.0) -> None:
        self.tokens_per_word = tokens_per_word

    def text(self, num_tokens: int, rng: random.Random) -> str:
        """About that many tokens, exactly where a word is one; at least one word."""
        count = max(1, round(num_tokens / self.tokens_per_word))
        return " ".join(rng.choices(COMMON, k=count))
