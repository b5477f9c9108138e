"""Requests of a load test and their prompts, independent of the API that they are sent to."""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXT = (
    "the and of to a in that it is was I for on you he be with as by at have are this not but had "
    "his they from she which or we an there her were one do all their has would will what if can "
    "when so no said who more about up out them some"
)
COMMON = tuple(_TEXT.split())
"""Words that are one token each, with the preceding space, in nearly every vocabulary."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a request in tokens, and its number of samples or beams."""

    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, int] | None = None
    """Index and length of a prefix shared with other requests; included in `prompt_tokens`."""
    kind: str = ""
    """Class of the request, for workloads that mix several."""
    samples: int = 1
    beams: int = 1

    def scaled(self, factor: float) -> Shape:
        """Return the shape with all lengths multiplied by `factor`, at least one token each."""

        def times(tokens: int) -> int:
            return max(1, round(tokens * factor))

        prefix = self.prefix and (self.prefix[0], times(self.prefix[1]))
        return Shape(
            times(self.prompt_tokens),
            times(self.output_tokens),
            prefix,
            self.kind,
            self.samples,
            self.beams,
        )


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    index: int
    shape: Shape
    prompt: str
    due_s: float | None
    """Send time in seconds since the start; None in a closed loop, which sends when a user is
    free."""
    seed: int


class Words:
    """Generates prompts of random common words, without the model's tokenizer."""

    def __init__(self, tokens_per_word: float = 1.0) -> None:
        """tokens_per_word: average tokens per word of COMMON in the server's tokenizer."""
        self.tokens_per_word = tokens_per_word

    def text(self, num_tokens: int, rng: random.Random) -> str:
        """Return text of about `num_tokens` tokens, or exactly that many if each word is one token.

        The text has at least one word.
        """
        count = max(1, round(num_tokens / self.tokens_per_word))
        return " ".join(rng.choices(COMMON, k=count))
