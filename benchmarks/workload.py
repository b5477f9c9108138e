"""The requests of a load: three lengths of prompt and three of answer, as AWS's article had them.

That is Llama-2-7B in SageMaker's LMI container under its batching strategies: 50 concurrent
clients, prompts of three lengths, answers of 64, 128 and 256 tokens. The article does not say how
long its prompts are; these are short, medium and long.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    max_tokens: int
    """Generated to the last: end-of-sequence tokens are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Closed: each client sends its next request once it has its answer."""

    clients: int
    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    max_model_len: int
    num_requests: int
    """Most that are ever sent; time is usually up before."""

    def requests(
        self, vocab_size: int, *, max_tokens: int | None = None, seed: int = 0
    ) -> Iterator[Request]:
        """The same for the same seed: every pair of lengths once, in a random order, and again.

        max_tokens: of every answer, in place of its own length.
        """
        rng = random.Random(seed)
        pairs = [(prompt, answer) for prompt in self.prompts for answer in self.answers]
        for index in range(self.num_requests):
            if index % len(pairs) == 0:
                rng.shuffle(pairs)
            prompt, answer = pairs[index % len(pairs)]
            yield Request(rng.choices(range(vocab_size), k=prompt), max_tokens or answer)

    def pool_blocks(self, block_size: int) -> int:
        """KV blocks with which every client may have a sequence of the longest kind."""
        return self.clients * -(-self.max_model_len // block_size)


FULL_LOAD = Load(
    clients=50,
    prompts=(64, 256, 1024),
    answers=(64, 128, 256),
    max_model_len=4096,
    num_requests=4000,
)
DRY_LOAD = Load(
    clients=10, prompts=(3, 15, 16), answers=(2, 3, 5), max_model_len=48, num_requests=18
)
