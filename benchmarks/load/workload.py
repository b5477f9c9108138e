"""The load of the serving benchmarks, modelled on AWS's article about batching strategies.

The article measures Llama-2-7B in SageMaker's LMI container: 50 concurrent clients, prompts of
three lengths, outputs of 64, 128 and 256 tokens. It does not give the prompt lengths; ours are
short, medium and long.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the server under test."""

    prompt: list[int]
    """Token ids."""
    max_tokens: int
    """Tokens to generate; end-of-sequence tokens are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A closed loop: each client sends its next request once its previous one has finished."""

    clients: int
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    max_model_len: int
    num_requests: int
    """Maximum number of requests. A run usually reaches its time limit first."""

    def requests(
        self, vocab_size: int, *, max_tokens: int | None = None, seed: int = 0
    ) -> Iterator[Request]:
        """Yield requests; the same seed gives the same requests.

        Each round uses every pair of prompt and output length once, in a new random order.
        max_tokens overrides all output lengths.
        """
        rng = random.Random(seed)
        pairs = [
            (prompt, output) for prompt in self.prompt_lengths for output in self.output_lengths
        ]
        for index in range(self.num_requests):
            if index % len(pairs) == 0:
                rng.shuffle(pairs)
            prompt_length, output_length = pairs[index % len(pairs)]
            prompt = rng.choices(range(vocab_size), k=prompt_length)
            yield Request(prompt, max_tokens or output_length)

    def pool_blocks(self, block_size: int) -> int:
        """Return the KV blocks needed for every client to run a sequence of the maximum length."""
        return self.clients * -(-self.max_model_len // block_size)


FULL_LOAD = Load(
    clients=50,
    prompt_lengths=(64, 256, 1024),
    output_lengths=(64, 128, 256),
    max_model_len=4096,
    num_requests=4000,
)
DRY_LOAD = Load(
    clients=10,
    prompt_lengths=(3, 15, 16),
    output_lengths=(2, 3, 5),
    max_model_len=48,
    num_requests=18,
)
