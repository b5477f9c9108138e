"""What the KV cache keeps of each token. Capacity, the KV cache and `longshore plan` share it.

It needs no torch.
"""

from __future__ import annotations

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


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int, itemsize: int) -> int:
    """Return the bytes of one KV block over all layers.

    itemsize: bytes of one element of the KV cache.
    """
    return sum(shape.numel for shape in shapes) * block_size * itemsize
