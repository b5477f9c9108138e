"""How the current GPU divides a prefill: its tile, the number of splits, and the work list.

A work list is made for one tile. So these functions get the query and the cache that
`kernels.attention.paged_prefill.paged_prefill` will get.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.attention.prefill_work import (
    MIN_SPLIT_KEYS,
    PrefillWork,
    is_any_split,
    make_prefill_work,
)
from kernels.attention.segments import SEGMENT_KEYS, make_segment_work
from kernels.attention.work_list import WAVES
from kernels.configurations import AttentionConfiguration, attention_configuration


def prefill_work(
    query: Tensor,
    key_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    num_splits: int,
    *,
    window: int | None = None,
    min_split_keys: int = MIN_SPLIT_KEYS,
) -> PrefillWork:
    """Return `kernels.attention.prefill_work.make_prefill_work` for these shapes on the current
    GPU."""
    tile = prefill_tile(query, key_cache)
    block_q, _ = tiling(query, key_cache, tile)
    return make_prefill_work(
        query_starts, context_lens, (block_q, tile.block_n), len(query), num_splits,
        window=window, min_split_keys=min_split_keys,
    )


def segment_work(
    query: Tensor,
    key_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    num_splits: int,
    *,
    window: int | None = None,
    segment_keys: int = SEGMENT_KEYS,
) -> PrefillWork:
    """Return `kernels.attention.segments.make_segment_work` for these shapes on the current GPU.

    With such a list, the bits of a token depend only on its sequence's tokens up to its own.
    """
    tile = prefill_tile(query, key_cache, segment_keys)
    block_q, _ = tiling(query, key_cache, tile)
    return make_segment_work(
        query_starts, context_lens, (block_q, tile.block_n), len(query), num_splits,
        window=window, segment_keys=segment_keys,
    )


def wanted_segments(
    query: Tensor, key_cache: Tensor, longest: int, num_processors: int, window: int | None = None
) -> int:
    """Return how many splits a work list in segments should have room for.

    longest: the longest context. num_processors: streaming multiprocessors.
    """
    tile = prefill_tile(query, key_cache, SEGMENT_KEYS)
    block_q, num_tiles = tiling(query, key_cache, tile)
    visible = longest if window is None else min(longest, window + block_q)
    num_splits = WAVES * num_processors * tile.programs_per_processor // num_tiles
    return num_splits if visible > SEGMENT_KEYS and num_splits > 1 else 0


def max_segment_slots(
    query: Tensor, key_cache: Tensor, longest: int, num_processors: int
) -> int:
    """Return the most slots that a work list in segments may have, for any window."""
    num_splits = wanted_segments(query, key_cache, longest, num_processors)
    return num_splits * tiling(query, key_cache, prefill_tile(query, key_cache, SEGMENT_KEYS))[0]


def wanted_splits(
    query: Tensor,
    key_cache: Tensor,
    lengths: Sequence[tuple[int, int]] | None,
    num_processors: int,
    max_context_len: int,
    window: int | None = None,
) -> int:
    """Return how many splits a work list should have room for; 0 if no block should be split.

    lengths: new tokens and context length of each sequence; None if only the device knows them,
    as in a CUDA graph. num_processors: streaming multiprocessors. max_context_len: the longest
    context that the model allows, used without `lengths`. If there is room for splits, each layer
    also launches the combining kernel.
    """
    tile = prefill_tile(query, key_cache)
    block_q, num_tiles = tiling(query, key_cache, tile)
    longest = max_context_len
    if lengths is not None:
        longest = max((context for new, context in lengths if new), default=0)
    visible = longest if window is None else min(longest, window + block_q)
    if visible < 2 * MIN_SPLIT_KEYS:
        return 0
    num_splits = WAVES * num_processors * tile.programs_per_processor // num_tiles
    if num_splits < 2:
        return 0
    if lengths is not None and not is_any_split(lengths, block_q, num_splits, window):
        return 0
    return num_splits


def max_slots(query: Tensor, key_cache: Tensor, num_processors: int, max_context_len: int) -> int:
    """Return the most slots that the work list of a step may have, for any lengths and window."""
    num_splits = wanted_splits(query, key_cache, None, num_processors, max_context_len)
    return num_splits * tiling(query, key_cache, prefill_tile(query, key_cache))[0]


def tiling(query: Tensor, cache: Tensor, tile: AttentionConfiguration) -> tuple[int, int]:
    """Return the query tokens in a block, and the head tiles of a block."""
    group = query.shape[1] // cache.shape[2]
    heads_per_tile = min(group, tile.block_m)
    return tile.block_m // heads_per_tile, cache.shape[2] * -(-group // heads_per_tile)


def prefill_tile(
    query: Tensor, cache: Tensor, segment_keys: int | None = None
) -> AttentionConfiguration:
    """Return the configuration for these shapes. segment_keys: None if keys are not in segments."""
    kernel = "prefill" if segment_keys is None else "segments"
    group = query.shape[1] // cache.shape[2]
    return attention_configuration(kernel, query.shape[2], group, query.dtype, cache.dtype)
