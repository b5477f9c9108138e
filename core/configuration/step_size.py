"""The sizes of steps that CUDA graphs are captured for.

A graph replays kernels of fixed shapes, so a step is padded to the size of the smallest graph that
it fits into. The engine and `longshore plan` share these sizes; they need no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.plan import Chunk

DEFAULT_PROMPT_SIZES = (64, 128, 256, 512, 768, 1024)
"""Prompt tokens of mixed steps that run as graphs; see `option.cuda_graph_sizes`."""
MAX_PROMPTS = 16
"""Maximum prompts in a mixed step that runs as a graph. If a step has fewer prompts than its graph,
each missing one costs an empty program of the attention kernel per layer and KV head."""
MAX_DRAFTS = 256
"""The most drafts in a step: each has logits of its own. A large batch samples from as many."""
MAX_DRAFTING = 64
"""Maximum sequences with drafts, and as many without, in a step that runs as a graph. Drafts hardly
pay for more."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """How many decodes and prompts a step has, or how many it is padded to.

    ```
    tokens       | decodes, one token each | padding | tokens of prompts     | padding |
                 |<------- num_decodes ------------->|<------ num_prompt_tokens ------>|
    sequences    | decodes                 | padding | prompts               | padding |
                 |<------- num_decodes ------------->|<--------- num_prompts --------->|
    ```

    A chunk of one token counts as a decode, even if it belongs to a prompt. A decode with drafts
    counts as a prompt, and each of its drafts as an extra row.
    """

    num_decodes: int
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_extra_rows: int = 0
    """Tokens that need logits beside those which are sampled from, one for each sequence."""

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> StepSize:
        lengths = [chunk.length for chunk in chunks]
        num_decodes = lengths.count(1)
        return cls(num_decodes, len(lengths) - num_decodes, sum(lengths) - num_decodes)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return self.num_sequences + self.num_extra_rows

    def fits(self, step: StepSize) -> bool:
        """Whether `step` can be padded to this size."""
        return (
            step.num_decodes <= self.num_decodes
            and step.num_prompts <= self.num_prompts
            and step.num_prompt_tokens <= self.num_prompt_tokens
            and step.num_extra_rows <= self.num_extra_rows
        )


def graph_sizes(
    max_sequences: int, max_step_tokens: int, prompt_sizes: Sequence[int], num_drafts: int = 0
) -> list[StepSize]:
    """Return the sizes to capture: those without prompts, then mixed ones, smallest first.

    prompt_sizes: numbers of prompt tokens, ascending. `max_step_tokens` replaces larger ones.
    num_drafts: the most of a sequence, for which there are sizes between the others.
    """
    sizes = [StepSize(num_decodes) for num_decodes in decode_sizes(max_sequences)]
    if num_drafts:
        sizes += _draft_sizes(max_sequences, max_step_tokens, num_drafts)
    for num_tokens in _up_to(max_step_tokens, prompt_sizes):
        num_prompts = max(1, min(MAX_PROMPTS, max_sequences, num_tokens // 2))
        sizes += [
            StepSize(num_decodes, num_prompts, num_tokens)
            for num_decodes in _decodes_beside_prompts(max_sequences)
        ]
    return sizes


def decode_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes of steps without prompts, up to `max_rows`.

    Small sizes are close together, since a padding row costs most there.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def largest_of(sizes: Sequence[StepSize]) -> StepSize:
    """Return the size with the most tokens, the last of several."""
    return max(reversed(sizes), key=lambda size: size.num_tokens)


def _draft_sizes(max_sequences: int, max_step_tokens: int, num_drafts: int) -> list[StepSize]:
    """Return sizes of steps in which some sequences have drafts, beside some that have none.

    Rows cost far more than sequences do: each size has room for as many sequences with one draft as
    it has rows for.
    """
    width, most = 1 + num_drafts, min(max_sequences, MAX_DRAFTING)
    counts = [count for count in (1, 2, 4, 8, 12, 16, 24, 32, 48) if count < most] + [most]
    sizes: dict[StepSize, None] = {}
    for count in counts:
        num_tokens = min(count * width, MAX_DRAFTS + most)
        num_rows = min(count * num_drafts, MAX_DRAFTS)
        for num_decodes in _decodes_beside_prompts(max_sequences):
            if num_decodes <= MAX_DRAFTING and num_tokens <= max_step_tokens:
                size = StepSize(num_decodes, min(most, num_tokens // 2), num_tokens, num_rows)
                sizes[size] = None
    return list(sizes)


def _decodes_beside_prompts(max_sequences: int) -> list[int]:
    """Return how many decodes a mixed step may have; at least one sequence is a prompt."""
    powers = (1 << exponent for exponent in range(6, max_sequences.bit_length()))
    max_decodes = max_sequences - 1
    return [count for count in (0, 8, 32, *powers) if count < max_decodes] + [max_decodes]


def _up_to(limit: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes below `limit`, and `limit` if a size reaches it."""
    return sorted({min(size, limit) for size in sizes})
