"""Device functions that both paged attention kernels are made of: one tile of keys at a time.

Scores are kept in base 2: whoever calls folds log2(e) into `score_scale` and `cap`, so that each
weight is one fused multiply-add and one ex2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fp8 import e4m3_decode


@triton.jit
def row_offsets(
    table_ptr, tile, context_len, block_stride, token_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where the rows of key tile `tile` begin in the cache: [BLOCK_N] int64, in elements.

    Block ids are read once per block and not once per token, and none past the context's end.

    NOTE: without the hint the compiler loses sight of the alignment behind the reshape and reads
    the cache two bytes at a time. It holds because wrappers refuse strides that are no multiple
    of 16; a wrong hint would be a misaligned access on the GPU and nothing in the interpreter.
    """
    if BLOCK_N <= BLOCK_SIZE:
        first = tile * BLOCK_N
        block = tl.load(table_ptr + first // BLOCK_SIZE).to(tl.int64)
        offset = first % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        rows = block * block_stride + offset * token_stride
    else:
        BLOCKS: tl.constexpr = BLOCK_N // BLOCK_SIZE
        index = tile * BLOCKS + tl.arange(0, BLOCKS)
        is_used = index * BLOCK_SIZE < context_len
        blocks = tl.load(table_ptr + index, mask=is_used, other=0).to(tl.int64)
        offsets = tl.arange(0, BLOCK_SIZE) * token_stride
        rows = tl.reshape(blocks[:, None] * block_stride + offsets[None, :], (BLOCK_N,))
    return tl.multiple_of(rows, 16)


@triton.jit
def load_rows(
    base_ptr, rows, is_read, dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D] of K or V in `dtype`; zeros where not `is_read` and past HEAD_DIM."""
    dims = tl.arange(0, BLOCK_D)
    pointers = base_ptr + rows[:, None] + dims[None, :]
    if MASKED and HEAD_DIM < BLOCK_D:
        tile = tl.load(pointers, mask=is_read[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=is_read[:, None], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        tile = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    if tile.dtype == tl.uint8:
        return e4m3_decode(tile, dtype)
    if tile.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        # Triton 3.6 goes from fp16 to bf16 with an instruction that only sm_90 has.
        return tile.to(tl.float32).to(dtype)
    return tile.to(dtype)


@triton.jit
def softmax_step(
    products, is_seen, row_max, row_sum, score_scale, cap, MASKED: tl.constexpr
):  # fmt: skip
    """One step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867).

    products: [M, N] fp32, q·k; with `cap` the scores are cap * tanh(products * score_scale / 2 *
    ln 2). Returns the tile's weights, what older sums must be multiplied by, and the new row_max
    and row_sum.
    """
    if cap is None:
        factor = score_scale
    else:
        products = cap * (1.0 - 2.0 / (tl.exp2(products * score_scale) + 1.0))
        factor = 1.0
    if MASKED:
        products = tl.where(is_seen, products, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(products, 1) * factor)
    # A row that has seen no key yet has no maximum: -inf - -inf would be NaN.
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(products * factor - anchor[:, None])
    correction = tl.exp2(row_max - anchor)
    return weights, correction, new_max, row_sum * correction + tl.sum(weights, 1)
