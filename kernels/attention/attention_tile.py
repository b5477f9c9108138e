"""Device functions for one tile of keys, which both paged attention kernels use.

Scores are in base 2: callers multiply log2(e) into `score_scale` and `cap`, so each weight costs
one fused multiply-add and one ex2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fp8 import e4m3_shrunk


@triton.jit
def block_ids(table_ptr, tile, context_len, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the ids of the blocks that hold key tile `tile`, [BLOCK_N / BLOCK_SIZE] or [1].

    An id is read once per block, not once per token. Ids past the context's last block are not
    read; they are 0.
    """
    BLOCKS: tl.constexpr = (BLOCK_N + BLOCK_SIZE - 1) // BLOCK_SIZE
    index = tile * BLOCK_N // BLOCK_SIZE + tl.arange(0, BLOCKS)
    return tl.load(table_ptr + index, mask=index * BLOCK_SIZE < context_len, other=0)


@triton.jit
def row_offsets(
    blocks, tile, block_stride, token_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):
    """Return where the rows of key tile `tile` begin in the cache: [BLOCK_N] int64, in elements.

    blocks: the ids that `block_ids` loaded for this tile. PRECISION: the precision of tl.dot. If a
    tile lies in one block, the block's id becomes a scalar for fp32 ("ieee") and stays a tensor for
    tensor cores: compiled the other way round, some shapes spill registers.

    NOTE: without the hint tl.multiple_of, the compiler cannot see the alignment behind the reshape
    and reads the cache two bytes at a time. The hint holds because wrappers refuse strides that are
    not multiples of 16. If the hint were wrong, a GPU would report a misaligned access, and the
    interpreter would report nothing.
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
def rows_and_next_blocks(
    blocks, table_ptr, tile, context_len, block_stride, token_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):
    """Return `row_offsets` of key tile `tile`, and the block ids of the tile after it.

    blocks: the ids of tile `tile`, loaded in the iteration before. If K and V addresses depended on
    a load of the same iteration, Triton's pipeliner would give K and V fewer buffers than
    num_stages. The returned ids have the type of `blocks`.
    """
    rows = row_offsets(blocks, tile, block_stride, token_stride, BLOCK_SIZE, BLOCK_N, PRECISION)
    next_blocks = block_ids(table_ptr, tile + 1, context_len, BLOCK_SIZE, BLOCK_N)
    return rows, next_blocks.to(blocks.dtype)


@triton.jit
def load_rows(
    base_ptr, rows, is_read, dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):
    """Load a [BLOCK_N, BLOCK_D] tile of K or V as `dtype`, which is fp16 if the cache is fp8.

    Rows that are not `is_read` (only if MASKED) and dims past HEAD_DIM are zero. The numbers of a
    uint8 cache come out too small, by the factor `kernels.fp8.decode_factor`.
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
    return e4m3_shrunk(tile) if tile.dtype == tl.uint8 else tile.to(dtype)


@triton.jit
def to_fp16(query):
    """Return a bf16 query in fp16, and the factor by which each row was divided.

    With fp8 caches both products are computed in fp16, which holds every e4m3 number. A bf16 query
    may be too large for fp16, so each row is divided by the power of two of its largest number.
    Numbers of at least 2^-7 times the largest stay exact. All errors are below 2^-25 of the
    largest.
    """
    wide = query.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True)
    power = (largest & 0x7F800000).to(tl.float32, bitcast=True)
    row_scale = tl.where(power == 0, 1.0, power)
    return (wide / row_scale[:, None]).to(tl.float16), row_scale


@triton.jit
def load_query(row_ptrs, is_row, key_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the first DIM numbers of rows of queries, [M, BLOCK_D], and return their row_scale.

    row_ptrs: where the rows begin, [M]. Rows that are not `is_row` are zero. row_scale: [M] from
    `to_fp16`, or [1] if it is not needed (Triton 3.6 cannot return None).
    """
    dims = tl.arange(0, BLOCK_D)
    is_query = is_row[:, None] & (dims < DIM)[None, :]
    query = tl.load(row_ptrs[:, None] + dims[None, :], mask=is_query, other=0.0)
    row_scale = tl.full((1,), 1.0, tl.float32)
    if query.dtype == tl.bfloat16 and key_ptr.dtype.element_ty != tl.bfloat16:
        query, row_scale = to_fp16(query)
    return query, row_scale


@triton.jit
def softmax_step(
    products, is_seen, row_max, row_sum, score_scale, cap, MASKED: tl.constexpr
):
    """Compute one step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867).

    products: [M, N] fp32, q·k. With `cap` the scores are cap * tanh(products * score_scale * ln(2)
    / 2). Returns the tile's weights, the factor that corrects earlier sums, and the new row_max and
    row_sum.
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


@triton.jit
def attend_tile(
    attended, row_max, row_sum, query, row_scale, tail, tail_scale, key_ptr, value_ptr, rows,
    is_read, is_seen, score_scale, cap,
    HEAD_DIM: tl.constexpr, TAIL_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):
    """Return the running sums after one more tile of keys.

    rows: where the tile's rows begin. is_read: which of them `load_rows` may read. is_seen: which
    keys the queries see. row_scale, tail_scale: from `load_query`.

    If the rows are latents, value_ptr is None: V is the first HEAD_DIM numbers of K's row, and the
    tile is read once for both. K has TAIL_DIM more numbers, for which `tail` has the queries. As
    HEAD_DIM + TAIL_DIM is no power of two, they have a product of their own.
    """
    keys = load_rows(key_ptr, rows, is_read, query.dtype, HEAD_DIM, BLOCK_D, MASKED)
    products = tl.dot(query, keys.T, input_precision=PRECISION)
    if row_scale.shape[0] > 1:
        products *= row_scale[:, None]
    if TAIL_DIM > 0:
        tails = load_rows(
            key_ptr + HEAD_DIM, rows, is_read, query.dtype, TAIL_DIM, TAIL_DIM, MASKED
        )
        if row_scale.shape[0] > 1:
            products += tl.dot(tail, tails.T, input_precision=PRECISION) * tail_scale[:, None]
        else:
            products = tl.dot(tail, tails.T, products, input_precision=PRECISION)
    weights, correction, row_max, row_sum = softmax_step(
        products, is_seen, row_max, row_sum, score_scale, cap, MASKED
    )
    if value_ptr is None:
        values = keys
    else:
        values = load_rows(value_ptr, rows, is_read, query.dtype, HEAD_DIM, BLOCK_D, MASKED)
    attended = tl.dot(
        weights.to(query.dtype), values, attended * correction[:, None], input_precision=PRECISION
    )
    return attended, row_max, row_sum


@triton.jit
def unknown_zero(pointer, value):
    """Return 0 in such a way that the compiler does not know that it is 0.

    It is the difference between `value` and the same value, loaded again from `pointer`. Add it to
    offsets that are needed only after a loop. Otherwise the compiler would compute them before the
    loop and keep them in up to 32 registers per thread, and some kernels would spill.
    """
    return tl.load(pointer, volatile=True).to(tl.int32) - value
