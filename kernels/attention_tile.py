"""Device functions for one tile of keys, which both paged attention kernels use.

Scores are in base 2: callers multiply log2(e) into `score_scale` and `cap`, so each weight costs
one fused multiply-add and one ex2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fp8 import e4m3_decode


@triton.jit
def block_ids(table_ptr, tile, context_len, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the ids of the blocks that key tile `tile` lies in, [BLOCK_N / BLOCK_SIZE] or [1].

    An id is read once per block, not once per token, and never past the context's last block:
    there it is 0.
    """
    BLOCKS: tl.constexpr = (BLOCK_N + BLOCK_SIZE - 1) // BLOCK_SIZE
    index = tile * BLOCK_N // BLOCK_SIZE + tl.arange(0, BLOCKS)
    return tl.load(table_ptr + index, mask=index * BLOCK_SIZE < context_len, other=0)


@triton.jit
def row_offsets(
    blocks, tile, block_stride, token_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return where the rows of key tile `tile` begin in the cache: [BLOCK_N] int64, in elements.

    blocks: what `block_ids` loaded for this tile. PRECISION: that of tl.dot. The id of a tile's
    only block is made a scalar if they are fp32, and left a tensor for tensor cores: compiled the
    other way round, some shapes spill registers.

    NOTE: without the hint the compiler loses sight of the alignment behind the reshape and reads
    the cache two bytes at a time. The hint holds because wrappers refuse strides that are not
    multiples of 16. A wrong hint would be a misaligned access on the GPU and nothing in the
    interpreter.
    """
    ROWS: tl.constexpr = min(BLOCK_N, BLOCK_SIZE)
    offsets = (tile * BLOCK_N % BLOCK_SIZE + tl.arange(0, ROWS)) * token_stride
    if BLOCK_N <= BLOCK_SIZE and PRECISION == "ieee":
        rows = tl.sum(blocks, 0).to(tl.int64) * block_stride + offsets
    else:
        starts = blocks.to(tl.int64) * block_stride
        rows = tl.reshape(starts[:, None] + offsets[None, :], (BLOCK_N,))
    return tl.multiple_of(rows, 16)


@triton.jit
def load_rows(
    base_ptr, rows, is_read, dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load a [BLOCK_N, BLOCK_D] tile of K or V as `dtype`.

    Rows that are not `is_read` (only if MASKED) and dims past HEAD_DIM are zero.
    """
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
        # Triton 3.6 converts fp16 to bf16 with an instruction that only sm_90 has.
        return tile.to(tl.float32).to(dtype)
    return tile.to(dtype)


@triton.jit
def softmax_step(
    products, is_seen, row_max, row_sum, score_scale, cap, MASKED: tl.constexpr
):  # fmt: skip
    """Compute one step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867).

    products: [M, N] fp32, q·k; with `cap` the scores are cap * tanh(products * score_scale / 2 *
    ln 2). Returns the tile's weights, the factor that corrects earlier sums, and the new row_max
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
