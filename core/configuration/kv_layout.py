"""What the KV cache keeps of each token, and which layers share its blocks.

Capacity, the strategies' memory, the KV cache and `longshore plan` share it. It needs no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

LENGTHS = (1024, 4096, 32768, 131072)
"""Contexts for which layouts are compared."""
MOST_PARTS = 8
"""The most kernel blocks in a block: prefixes are found in steps of a block."""
TABLE_COST = 0.01
"""One table more for each sequence is worth this share of the memory, as it costs host time."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The K and V that a layer keeps of one token, and how long it reads them.

    ```
    row of a head, if K and V share dims | V's own (value_dim) | shared (shared_dim) | K's own |
                                                               <------- key_dim ------------->
    ```
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    """V's own dims, without those that are K's, too. 0: V is the first part of K (a latent)."""
    window: int | None = None
    """How many of the newest tokens the layer reads, the current one included; None: all."""
    source: int | None = None
    """The earlier layer whose K and V it reads, so that it keeps none itself; None: its own."""
    shared_dim: int = 0
    """The first dims of K that are the last dims of V; 0: K and V lie apart."""

    @property
    def is_latent(self) -> bool:
        """Whether V is a part of K."""
        return self.value_dim == 0

    @property
    def dims(self) -> tuple[int, int]:
        """All dims of K and of V, of one head."""
        return self.key_dim, self.value_dim + self.shared_dim

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The dims of each tensor that holds K and V: of both, or of K and of V."""
        if self.shared_dim:
            return (self.value_dim + self.key_dim,)
        return self.key_dim, self.value_dim

    @property
    def numel(self) -> int:
        """Elements that the layer keeps of a token."""
        if self.source is not None:
            return 0
        return self.num_kv_heads * (self.key_dim + self.value_dim)


NO_ATTENTION = LayerShape(1, 16, 16)
"""What a model without attention keeps of each token: some bytes that nobody reads. So its tokens
are counted, and its prefixes found, in blocks, as those of other models are."""


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
    """() for all layers."""
    num_parts: int = 1
    """Kernels know blocks of `block_size / num_parts` tokens. Block b is their blocks
    `b * part_stride`, `b * part_stride + 1`, ..."""
    part_stride: int = 1

    @property
    def part_size(self) -> int:
        """Tokens in a kernel's block."""
        return self.block_size // self.num_parts

    @property
    def slot_stride(self) -> int:
        """Token slots from one block to the next, as kernels count them."""
        return self.part_stride * self.part_size

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

    @property
    def has_windows(self) -> bool:
        """Whether blocks of some layers are freed while their sequence runs."""
        return any(group.window is not None for group in self.groups)

    @property
    def keeps_all(self) -> bool:
        """Whether all layers share one group and keep all tokens."""
        return len(self.groups) == 1 and not self.has_windows

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds while it grows to `num_tokens` tokens."""
        return sum(group.most_blocks(num_tokens, self.step_tokens) for group in self.groups)

    def num_blocks(self, shapes: Sequence[LayerShape], num_kv_blocks: int, itemsize: int) -> int:
        """Return how many blocks take the memory that option.num_kv_blocks stands for.

        It counts blocks of all layers, whatever groups they are in.
        """
        block_bytes = bytes_per_block(shapes, self.block_size, itemsize)
        return num_kv_blocks * block_bytes // self.block_bytes

    def longest(self, num_blocks: int, limit: int) -> int:
        """Return the length, up to `limit`, of the longest sequence that so many blocks hold."""
        return bisect_right(range(1, limit + 1), num_blocks, key=self.blocks_for)


def plan_layout(
    shapes: Sequence[LayerShape],
    block_size: int,
    itemsize: int,
    max_model_len: int,
    step_tokens: int,
) -> KVLayout:
    """Return the layout of a model's layers that wastes least memory.

    Layers that keep the same for equally long are of one kind. A model with one kind has one group,
    in blocks of `block_size` tokens. Otherwise each kind is split into groups of so many layers
    that all blocks have one size in bytes; a block then has a multiple of `block_size` tokens.

    itemsize: bytes of one element of the KV cache. step_tokens: see `CacheGroup.most_blocks`.
    """
    kinds = _layers_by_kind(shapes, max_model_len)
    if len(kinds) == 1:
        [(kind, layers)] = kinds.items()
        groups = (CacheGroup(block_size, kind.window, tuple(layers)),)
        return KVLayout(groups, len(layers) * kind.numel * block_size * itemsize, step_tokens)
    unit = gcd(*(kind.numel for kind in kinds))
    plans = list(_plans(kinds, unit, block_size, max_model_len))
    _, block_units, splits = min(plans, key=lambda plan: plan[:2])
    groups = tuple(
        replace(split.group, layers=tuple(kinds[split.kind][start : start + split.num_layers]))
        for split in splits
        for start in range(0, len(kinds[split.kind]), split.num_layers)
    )
    return KVLayout(groups, block_units * unit * itemsize, step_tokens)


def even_divisions(num_heads: int, num_kv_heads: Iterable[int]) -> list[int]:
    """Return over how many processes a model can be divided so that all plan the same layout.

    If layers have different numbers of KV heads, each process must have them in one proportion.
    num_heads, num_kv_heads: the model's query heads, and the KV heads of each layer.
    """
    counts = sorted(set(num_kv_heads))
    return [number for number in range(1, num_heads + 1) if _is_even(counts, number)]


def _is_even(counts: Sequence[int], number: int) -> bool:
    """Whether so many processes have these heads in one proportion, each at least one of them."""
    proportions: set[tuple[int, ...]] = set()
    for index in range(number if len(counts) > 1 else 1):
        ends = [(count * index // number, count * (index + 1) // number) for count in counts]
        shares = [max(1, end - start) for start, end in ends]
        proportions.add(tuple(share // gcd(*shares) for share in shares))
    return len(proportions) == 1


def _layers_by_kind(shapes: Sequence[LayerShape], max_len: int) -> dict[LayerShape, list[int]]:
    """Group the layers that keep K and V, by what they keep and how long somebody reads it."""
    kinds: dict[LayerShape, list[int]] = {}
    for index, shape in enumerate(shapes):
        if shape.source is None:
            readers = (s for s in shapes if s is shape or s.source == index)
            longest = max(reader.window or max_len for reader in readers)
            window = None if longest >= max_len else longest
            kinds.setdefault(replace(shape, window=window), []).append(index)
    return kinds


@dataclass(frozen=True, slots=True)
class _Split:
    """A way to put the layers of one kind into blocks."""

    kind: LayerShape
    num_layers: int
    """In a block."""
    group: CacheGroup
    cost: float


_Plan = tuple[float, int, list[_Split]]
"""The cost of a plan, the size of its blocks in units, and how it splits each kind."""


def _plans(
    kinds: dict[LayerShape, list[int]], unit: int, block_size: int, max_len: int
) -> Iterator[_Plan]:
    """Yield a plan for each size of blocks that some layers fill exactly.

    Sizes are in units of some elements: so shards with different numbers of heads plan the same.
    """
    lengths = [min(length, max_len) for length in LENGTHS]
    ideals = [
        sum(len(of) * kind.numel * min(n, kind.window or n) for kind, of in kinds.items()) / unit
        for n in lengths
    ]
    sizes = {
        kind.numel // unit * count * tokens
        for kind, layers in kinds.items()
        for count in range(1, len(layers) + 1)
        for tokens in range(block_size, MOST_PARTS * block_size + 1, block_size)
    }
    for size in sorted(sizes):
        given = size, unit, block_size, lengths, ideals
        options = [list(_splits(kind, len(layers), *given)) for kind, layers in kinds.items()]
        splits = [min(some, key=lambda split: split.cost) for some in options if some]
        hit = lcm(*(split.group.block_size for split in splits))
        if len(splits) == len(kinds) and hit <= MOST_PARTS * block_size:
            yield sum(split.cost for split in splits), size, splits


def _splits(
    kind: LayerShape,
    num_layers: int,
    size: int,
    unit: int,
    block_size: int,
    lengths: Sequence[int],
    ideals: Sequence[float],
) -> Iterator[_Split]:
    """Yield the ways to put a kind's layers into blocks of `size` units."""
    numel = kind.numel // unit
    for count in {-(-num_layers // number) for number in range(1, num_layers + 1)}:
        num_parts = min(MOST_PARTS, size // (count * numel * block_size))
        # Kernels step from one of a block's parts to the next by the size of a layer's K or V.
        num_tensors = len(kind.row_dims)
        is_even = len(set(kind.row_dims)) == 1 and size * num_tensors % (block_size * numel) == 0
        if num_parts > 1 and not is_even:
            num_parts = 1
        if num_parts == 0:
            continue
        stride = size * num_tensors // (block_size * numel) if num_parts > 1 else 1
        group = CacheGroup(
            block_size * num_parts, kind.window, num_parts=num_parts, part_stride=stride
        )
        num_tables = -(-num_layers // count)
        held = [num_tables * group.most_blocks(length, 1) * size for length in lengths]
        share = sum(h / ideal for h, ideal in zip(held, ideals, strict=True)) / len(lengths)
        yield _Split(kind, count, group, share + TABLE_COST * num_tables)


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int, itemsize: int) -> int:
    """Return the bytes of `block_size` tokens in all layers.

    itemsize: bytes of one element of the KV cache.
    """
    return sum(shape.numel for shape in shapes) * block_size * itemsize
