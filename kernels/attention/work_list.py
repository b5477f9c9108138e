"""The work list of decodes: which keys of which sequence each program attends over.

Sequences get programs in proportion to their keys, so a batch does not wait for its one long
context. The list is made on the device, and its size depends only on shapes: a CUDA graph that
makes it can be replayed with other context lengths. All layers of a step share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_SPLIT_KEYS = 256
"""Fewest keys in a split. Combining shorter splits would cost more time than they save."""
UNIT = 128
"""Splits begin at multiples of this many keys. It is a multiple of the keys in any tile."""
BALANCED_KEYS = 2048
"""If the batch fills the GPU, contexts of up to this many keys are not worth splitting."""
FULL = 0.9
"""A batch fills the GPU without splits if it has at least this many sequences per program that the
GPU runs at once."""
WAVES = 4
"""Maximum splits per program that runs at once, if unsplit sequences would fill more than half of
the GPU. Shorter splits end closer together, but each split has a fixed cost: more splits would cost
more than they gain."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """I items for N sequences."""

    items: Tensor
    """[I, 4] int32: sequence (-1: an idle item), first key, end key (exclusive), and the sequence's
    number of items."""
    rows: Tensor
    """[N, 3] int32: sequence, its first item, and its number of items."""


def wanted_splits(num_rows: int, num_programs: int, max_context_len: int) -> int:
    """Return how many splits a batch of `num_rows` sequences should have; 0 to split none.

    num_programs: sequences or splits that the GPU attends over at once. max_context_len: the
    longest context that the model or the window allows. Current contexts do not matter, so a CUDA
    graph can be captured.

    If whole sequences would fill at most half of the GPU, the splits fill it once: further splits
    would wait until others end. Otherwise there are WAVES times as many, so that they end closer
    together. There are no splits if contexts are too short to split, or if they are at most
    BALANCED_KEYS long and the batch fills the GPU.
    """
    is_full = num_rows >= FULL * num_programs
    if max_context_len < 2 * MIN_SPLIT_KEYS or (is_full and max_context_len <= BALANCED_KEYS):
        return 0
    waves = 1 if 2 * num_rows <= num_programs else WAVES
    return min(waves * num_programs, num_rows * (max_context_len // MIN_SPLIT_KEYS))


def max_items(max_rows: int, num_programs: int, max_context_len: int) -> int:
    """Return the most items that a list of up to `max_rows` sequences may have."""
    if max_context_len < 2 * MIN_SPLIT_KEYS:
        return 0
    return max_rows + min(WAVES * num_programs, max_rows * (max_context_len // MIN_SPLIT_KEYS))


def make_work_list(
    context_lens: Tensor,
    num_wanted: int,
    *,
    window: int | None = None,
    min_split_keys: int = MIN_SPLIT_KEYS,
) -> WorkList:
    """Divide the keys of N decoding sequences into about `num_wanted` splits; 0 splits none.

    Each sequence's share of the splits is rounded down, but every sequence has at least one item.
    So the list needs room for num_wanted + N items. context_lens: [N] int32 or int64, contiguous; a
    padding row has length 0 and gets an item without keys. window: only the last `window` keys
    count. min_split_keys: fewest keys in a split. With a window, a sequence's first split may have
    fewer, by up to UNIT.

    Raises ValueError if `min_split_keys` is not a multiple of UNIT.
    """
    if min_split_keys < UNIT or min_split_keys % UNIT:
        raise ValueError(f"min_split_keys is {min_split_keys}; it must be a multiple of {UNIT}")
    num_rows, device = len(context_lens), context_lens.device
    length = num_wanted + num_rows
    items = torch.empty(length, 4, dtype=torch.int32, device=device)
    rows = torch.empty(num_rows, 3, dtype=torch.int32, device=device)
    work_list_kernel[(num_rows,)](
        items, rows, context_lens, num_rows, num_wanted, length,
        2**30 if window is None else window, min_split_keys, UNIT=UNIT, BLOCK=256,
    )
    return WorkList(items, rows)


@triton.jit
def _visible(context_ptr, row, end_row, window, UNIT: tl.constexpr):
    """Return each row's context length, first visible key and unit, and number of visible units.

    Rows from `end_row` on have a length of 0.
    """
    context_len = tl.load(context_ptr + row, mask=row < end_row, other=0).to(tl.int32)
    first_key = tl.maximum(context_len - window, 0)
    first = first_key // UNIT
    return context_len, first_key, first, tl.cdiv(context_len, UNIT) - first


@triton.jit
def _num_splits(num_keys, units, total, num_wanted, min_split_keys):
    """Return the number of items of each sequence. total: visible units of all sequences."""
    share = (units.to(tl.int64) * num_wanted // total).to(tl.int32)
    return tl.maximum(tl.minimum(share, num_keys // min_split_keys), 1)


@triton.jit(
    do_not_specialize=["num_rows", "num_wanted", "length", "window", "min_split_keys"],
    do_not_specialize_on_alignment=["context_ptr"],
)
def work_list_kernel(
    items_ptr, rows_ptr, context_ptr, num_rows, num_wanted, length, window, min_split_keys,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write the items of one sequence; the last program also writes the idle items. Grid: (N,).

    Each program counts the items of all sequences before its own, so programs need not wait for
    each other.
    """
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    total = 0
    for first_row in range(0, num_rows, BLOCK):
        _, _, _, units = _visible(context_ptr, first_row + index, num_rows, window, UNIT)
        total += tl.sum(units, 0)
    total = tl.maximum(total, 1)
    start = 0
    for first_row in range(0, row, BLOCK):
        before = first_row + index
        context_len, first_key, _, units = _visible(context_ptr, before, row, window, UNIT)
        splits = _num_splits(context_len - first_key, units, total, num_wanted, min_split_keys)
        start += tl.sum(tl.where(before < row, splits, 0), 0)

    context_len, first_key, first, units = _visible(context_ptr, row, num_rows, window, UNIT)
    splits = _num_splits(context_len - first_key, units, total, num_wanted, min_split_keys)
    row_ptr = rows_ptr + row * 3
    tl.store(row_ptr, row)
    tl.store(row_ptr + 1, start)
    tl.store(row_ptr + 2, splits)
    for first_split in range(0, splits, BLOCK):
        split = first_split + index
        is_split = split < splits
        begin = (first + split * units // splits) * UNIT
        end = (first + (split + 1) * units // splits) * UNIT
        item_ptr = items_ptr + (start + split) * 4
        tl.store(item_ptr, row, mask=is_split)
        tl.store(item_ptr + 1, tl.maximum(begin, first_key), mask=is_split)
        tl.store(item_ptr + 2, tl.minimum(end, context_len), mask=is_split)
        tl.store(item_ptr + 3, splits, mask=is_split)
    if row == num_rows - 1:
        for first_idle in range(start + splits, length, BLOCK):
            idle = first_idle + index
            tl.store(items_ptr + idle * 4, -1, mask=idle < length)
