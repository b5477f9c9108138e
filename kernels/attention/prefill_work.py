"""The work list of prefills: which keys each program attends over, for which query tokens.

A sequence's query tokens are divided into blocks. A block gets programs in proportion to the keys
that it sees, so a batch does not wait for its one long prefix. The list is made on the device, and
its size depends only on shapes: a CUDA graph that makes it can be replayed with other lengths. All
layers of a step share it.

Keys are counted in units; a unit is as many keys as a block has tokens. Without a window, each
block of a sequence sees one unit more than the block before it, so sums over blocks have closed
forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.work_list import WAVES

MIN_SPLIT_KEYS = 512
"""Fewest keys in a split if whole blocks would fill at most half of the GPU: reading so many keys
takes about as long as launching the combining kernel. Otherwise the fewest are WAVES times that."""
MAX_BLOCK_Q = 128
"""Most query tokens in a block. The list's kernel writes all rows of a block with one store."""
BALANCED = 90
"""No block is split if whole blocks would keep the GPU busy for this percentage of the time."""
_ENDLESS = 2**30


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Room for W splits and B whole blocks of query tokens. Entries without work are idle."""

    items: Tensor
    """[W + B, 4] int32: sequence (-1: an idle item), the block's first token (its index among the
    sequence's new tokens), first key tile, and end tile (exclusive). Splits come first, then whole
    blocks, last block first."""
    rows: Tensor
    """[R, 3] int32, for the query rows whose keys are split: the row, the slot of its first result
    and its number of results (0: an idle entry). A row's results are `block_q` slots apart."""
    num_splits: int
    """W, which includes idle splits. The slots of split i begin at i * block_q."""
    block_q: int
    """Most tokens in a block."""
    segment_keys: int | None = None
    """Keys of a segment (`kernels.attention.segments`), if splits and whole blocks are computed
    segment by segment."""

    @property
    def num_slots(self) -> int:
        return self.num_splits * self.block_q


def make_prefill_work(
    query_starts: Tensor,
    context_lens: Tensor,
    tile: tuple[int, int],
    num_tokens: int,
    num_splits: int,
    *,
    window: int | None = None,
    min_split_keys: int = MIN_SPLIT_KEYS,
) -> PrefillWork:
    """Divide the keys of blocks of query tokens into at most `num_splits` splits.

    query_starts: [N + 1], context_lens: [N], both int32 or int64 and contiguous. tile: tokens in a
    block, at most MAX_BLOCK_Q, and keys in a tile. num_tokens: T, at least query_starts[-1]; the
    list has room for T // tokens + N blocks.

    The GPU is assumed to run P = num_splits // WAVES programs at once. If whole blocks would fill
    at most half of it, there are at most P splits. Otherwise there are up to `num_splits`, so that
    all programs end at about the same time, or none if whole blocks already do so (BALANCED).

    A split has at least `min_split_keys` keys, or WAVES times as many in the second case. With a
    window it may have fewer, by up to a block's tokens.
    """
    block_q, block_n = tile
    assert block_q <= MAX_BLOCK_Q
    num_sequences, device = len(context_lens), context_lens.device
    num_blocks = num_tokens // block_q + num_sequences
    # A split block has at least two splits, so at most num_splits // 2 blocks are split.
    num_rows = min(num_tokens, num_splits // 2 * block_q)
    items = torch.empty(num_splits + num_blocks, 4, dtype=torch.int32, device=device)
    rows = torch.empty(num_rows, 3, dtype=torch.int32, device=device)
    prefill_work_kernel[(num_blocks,)](
        items, rows, query_starts, context_lens, num_sequences, num_splits, num_rows,
        block_q, block_n, _ENDLESS if window is None else window, _most_units(window, block_q),
        -(-min_split_keys // block_q) if num_splits else _ENDLESS,
        -(-WAVES * min_split_keys // block_q) if num_splits else _ENDLESS,
        WAVES=WAVES, BALANCED=BALANCED, ENDLESS=_ENDLESS, BLOCK=MAX_BLOCK_Q,
    )
    return PrefillWork(items, rows, num_splits, block_q)


def is_any_split(
    lengths: Sequence[tuple[int, int]], block_q: int, num_splits: int, window: int | None
) -> bool:
    """Return whether `make_prefill_work` would split any block.

    lengths: new tokens and context length of each sequence.
    """
    longest = total = num_live = 0
    most = _most_units(window, block_q)
    for new, context in lengths:
        blocks, units = -(-new // block_q), (context - new) // block_q + 1
        rising = min(max(most - units, 0), blocks)
        total += rising * (2 * units + rising - 1) // 2 + (blocks - rising) * most
        num_live += blocks
        longest = max(longest, min(units + blocks - 1, most) if blocks else 0)
    at_once = max(num_splits // WAVES, 1)
    if BALANCED * longest * -(-num_live // at_once) * at_once <= 100 * total:
        return False
    if 2 * num_live <= at_once:
        length = max(total // (at_once + 1) + 1, -(-MIN_SPLIT_KEYS // block_q))
    else:
        length = max(total // (num_splits + 1) + 1, -(-WAVES * MIN_SPLIT_KEYS // block_q))
    return longest >= 2 * length


def _most_units(window: int | None, block_q: int) -> int:
    """Return the most units that a block sees with this window."""
    return _ENDLESS if window is None else window // block_q + 1


@triton.jit
def _sequences(starts_ptr, context_ptr, index, num_sequences, block_q):
    """Return five numbers of each sequence `index`: its first row, its number of new tokens, its
    context length, its number of blocks, and the units that its first block sees.

    Sequences from `num_sequences` on have no blocks.
    """
    is_sequence = index < num_sequences
    start = tl.load(starts_ptr + index, mask=is_sequence, other=0).to(tl.int32)
    end = tl.load(starts_ptr + index + 1, mask=is_sequence, other=0).to(tl.int32)
    context_len = tl.load(context_ptr + index, mask=is_sequence, other=0).to(tl.int32)
    query_len = end - start
    units = tl.maximum(context_len - query_len, 0) // block_q + 1
    return start, query_len, context_len, tl.cdiv(query_len, block_q), units


@triton.jit
def _staircase(end, length):
    """Return the sum of i // length over i < end."""
    steps = end.to(tl.int64) // length
    return length * (steps * (steps - 1) // 2) + steps * (end - steps * length)


@triton.jit
def _shares(units, num_blocks, most, length):
    """Return the sum of min(units + i, most) // length over the first `num_blocks` blocks i."""
    rising = tl.minimum(tl.maximum(most - units, 0), num_blocks)
    shares = _staircase(units + rising, length) - _staircase(units, length)
    return shares + (num_blocks - rising).to(tl.int64) * (most // length)


@triton.jit
def _num_whole(units, num_blocks, most, length):
    """Return how many blocks of a sequence are not split. They come before its split blocks."""
    num_short = tl.minimum(tl.maximum(2 * length - units, 0), num_blocks)
    return tl.where(most >= 2 * length, num_short, num_blocks)


@triton.jit
def _sequence_and_length(
    starts_ptr, context_ptr, block, num_sequences, num_splits, block_q, most, min_few, min_many,
    WAVES: tl.constexpr, BALANCED: tl.constexpr, ENDLESS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return the sequence of a block, and the units in a split (ENDLESS: no block is split).

    min_few, min_many: the fewest units in a split if whole blocks fill at most half of the GPU, and
    if they fill more. Sequence i begins at block starts[i] // block_q + i. So it has at least as
    many blocks as it needs, whatever the lengths; a surplus block is idle.
    """
    total = tl.full((), 0, tl.int64)
    longest = 0
    num_live = 0
    num_begun = 0
    for first in range(0, num_sequences, BLOCK):
        index = first + tl.arange(0, BLOCK)
        start, _, _, blocks, units = _sequences(
            starts_ptr, context_ptr, index, num_sequences, block_q
        )
        total += tl.sum(_shares(units, blocks, most, 1), 0)
        most_seen = tl.where(blocks > 0, tl.minimum(units + blocks - 1, most), 0)
        longest = tl.maximum(longest, tl.max(most_seen, 0))
        num_live += tl.sum(blocks, 0)
        has_begun = (index < num_sequences) & (start // block_q + index <= block)
        num_begun += tl.sum(has_begun.to(tl.int32), 0)
    at_once = tl.maximum(num_splits // WAVES, 1)
    are_few = 2 * num_live <= at_once
    # The shortest length that gives no more splits than wanted: a block with u units has
    # u // length splits, so all blocks have at most total // length.
    length = total // (tl.where(are_few, at_once, num_splits) + 1) + 1
    length = tl.maximum(length, tl.where(are_few, min_few, min_many))
    whole_time = tl.cdiv(num_live, at_once).to(tl.int64) * longest * at_once
    return num_begun - 1, tl.where(BALANCED * whole_time <= 100 * total, ENDLESS, length)


@triton.jit
def _count_splits(
    starts_ptr, context_ptr, end, num_sequences, block_q, most, length, BLOCK: tl.constexpr
):
    """Return how many splits the sequences before `end` have, and how many rows are split."""
    num_items = tl.full((), 0, tl.int64)
    num_rows = tl.full((), 0, tl.int64)
    for first in range(0, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        _, query_len, _, blocks, units = _sequences(
            starts_ptr, context_ptr, index, num_sequences, block_q
        )
        num_whole = _num_whole(units, blocks, most, length)
        splits = _shares(units, blocks, most, length) - _shares(units, num_whole, most, length)
        rows = tl.maximum(query_len - num_whole * block_q, 0)
        num_items += tl.sum(tl.where(index < end, splits, 0), 0)
        num_rows += tl.sum(tl.where(index < end, rows, 0), 0)
    return num_items.to(tl.int32), num_rows.to(tl.int32)


@triton.jit
def _store_item(items_ptr, item, mask, sequence, first_token, begin, end):
    item_ptr = items_ptr + item * 4
    tl.store(item_ptr, sequence, mask=mask)
    tl.store(item_ptr + 1, first_token, mask=mask)
    tl.store(item_ptr + 2, begin, mask=mask)
    tl.store(item_ptr + 3, end, mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_sequences", "num_splits", "num_rows", "block_q", "block_n", "window", "most",
        "min_few", "min_many",
    ],
    do_not_specialize_on_alignment=["starts_ptr", "context_ptr"],
)
def prefill_work_kernel(
    items_ptr, rows_ptr, starts_ptr, context_ptr, num_sequences, num_splits, num_rows,
    block_q, block_n, window, most, min_few, min_many,
    WAVES: tl.constexpr, BALANCED: tl.constexpr, ENDLESS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write the items and rows of one block; the first program also writes the idle ones.

    The grid is (B,). Each program counts the splits of all blocks before its own, so programs need
    not wait for each other.
    """
    block = tl.program_id(0)
    sequence, length = _sequence_and_length(
        starts_ptr, context_ptr, block, num_sequences, num_splits, block_q, most, min_few, min_many,
        WAVES, BALANCED, ENDLESS, BLOCK,
    )
    start, query_len, context_len, blocks, units = _sequences(
        starts_ptr, context_ptr, sequence, num_sequences, block_q
    )
    number = block - start // block_q - sequence
    first_token = number * block_q
    first_position = context_len - query_len + first_token
    begin = tl.maximum(first_position - window + 1, 0) // block_n
    end_key = tl.minimum(first_position + block_q, context_len)
    num_tiles = tl.maximum(tl.cdiv(end_key, block_n) - begin, 0)

    num_whole = _num_whole(units, blocks, most, length)
    owner = tl.where(number < num_whole, sequence, -1)
    item = num_splits + tl.num_programs(0) - 1 - block
    _store_item(items_ptr, item, True, owner, first_token, begin, begin + num_tiles)
    index = tl.arange(0, BLOCK)
    if (number < blocks) & (number >= num_whole):
        item, row = _count_splits(
            starts_ptr, context_ptr, sequence, num_sequences, block_q, most, length, BLOCK
        )
        before = _shares(units, number, most, length) - _shares(units, num_whole, most, length)
        item += before.to(tl.int32)
        count = (tl.minimum(units + number, most) // length).to(tl.int32)
        for first in range(0, count, BLOCK):
            split = first + index
            first_tile = begin + split * num_tiles // count
            end_tile = begin + (split + 1) * num_tiles // count
            _store_item(
                items_ptr, item + split, split < count, sequence, first_token, first_tile, end_tile
            )
        is_row = index < tl.minimum(query_len - first_token, block_q)
        row_ptr = rows_ptr + (row + (number - num_whole) * block_q + index) * 3
        tl.store(row_ptr, start + first_token + index, mask=is_row)
        tl.store(row_ptr + 1, item * block_q + index, mask=is_row)
        tl.store(row_ptr + 2, count, mask=is_row)
    if block == 0:
        first_idle, first_row = _count_splits(
            starts_ptr, context_ptr, num_sequences, num_sequences, block_q, most, length, BLOCK
        )
        for first in range(first_idle, num_splits, BLOCK):
            tl.store(items_ptr + (first + index) * 4, -1, mask=first + index < num_splits)
        for first in range(first_row, num_rows, BLOCK):
            tl.store(rows_ptr + (first + index) * 3 + 2, 0, mask=first + index < num_rows)
