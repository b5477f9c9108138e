"""What the KV cache keeps of each token, and which layers share its blocks.

Capacity, the strategies' memory, the KV cache and `longshore plan` share it. It needs no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The K and V that a layer keeps of one token, and how long it reads them."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    """May differ from `key_dim`. 0: V is the first part of K's row (a latent)."""
    window: int | None = None
    """How many of the newest tokens the layer reads, the current one included; None: all."""
    source: int | None = None
    """The earlier layer whose K and V it reads, so that it keeps none itself; None: its own."""

    @property
    def numel(self) -> int:
        """Elements that the layer keeps of a token."""
        if self.source is not None:
            return 0
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose K and V of the same tokens lie in one block, and are read equally long.

    ```
    window      |                    |<---- window ---->|      A block is freed once the token at
    blocks      | free | free | free | held | held | held |    `position`, the oldest that is not
                                                    ▲          computed, no longer sees any of it.
                                                 position
    ```
    """

    block_size: int
    """Tokens in a block."""
    window: int | None = None
    """See `LayerShape.window`."""
    layers: tuple[int, ...] = ()

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def first_block(self, position: int) -> int:
        """Return the first block that the token at `position`, or a later one, reads."""
        if self.window is None:
            return 0
        return max(0, position + 1 - self.window) // self.block_size

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the most blocks that a sequence holds while it grows to `num_tokens` tokens.

        step_tokens: the most tokens of it that are computed and not committed.
        """
        blocks = self.blocks_for(num_tokens)
        if self.window is None:
            return blocks
        return min(blocks, self.blocks_for(self.window + step_tokens - 2) + 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model's layers. Their blocks have one size in bytes, so they share a pool.

    A model whose layers are all alike has one group.
    """

    groups: tuple[CacheGroup, ...]
    block_bytes: int = 0
    """Bytes of a block, over all layers of its group."""
    step_tokens: int = 0
    """See `CacheGroup.most_blocks`."""

    @classmethod
    def uniform(cls, block_size: int) -> KVLayout:
        """Return the layout of layers that all keep all tokens."""
        return cls((CacheGroup(block_size),))

    @property
    def block_size(self) -> int:
        """The fewest tokens in a block."""
        return min(group.block_size for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds while it grows to `num_tokens` tokens."""
        return sum(group.most_blocks(num_tokens, self.step_tokens) for group in self.groups)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Return the length, up to `limit`, of the longest sequence that so many blocks hold."""
        return bisect_right(range(1, limit + 1), num_blocks, key=self.blocks_for)


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int, itemsize: int) -> int:
    """Return the bytes of one KV block over all layers.

    itemsize: bytes of one element of the KV cache.
    """
    return sum(shape.numel for shape in shapes) * block_size * itemsize
