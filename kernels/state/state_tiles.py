"""The recurrence for prompts in bf16, 32 tokens of a sequence at once, on tensor cores.

A first launch computes for all tiles at once what does not depend on the state, and a second one
walks over the tiles of each sequence. In a tile, with the decays e^(g_i - g_j) between its tokens:

```
u = T (rate (v - e^g (k S)))      T = (I + L)^-1, L = rate k k' with decays, strictly lower
u = rate v                        Mamba-2
out = e^g (q S) + P u             P = q k' with decays, lower
S = e^G S + (e^(G - g) k)' u      G: the last g
```

Numbers in fp32 go to the tensor cores as the sum of two bf16, which keeps 16 bits of a product.
They take half the registers of tf32, with which these kernels would spill. Sums are in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned
from kernels.state.batch import StateBatch
from kernels.state.reference import LENGTH_EPS
from kernels.state.rows import check_recurrence
from kernels.state.state_step import run_steps

TILE, COLUMNS = 32, 16
"""Tokens of a tile and columns of a state in a program; with twice as many, registers spill."""
MAX_KEY_DIM = 128
BLOCK = 16
"""Rows of the diagonal blocks of L, which are inverted row by row."""


@triton.jit
def halves(numbers):
    """Return two bf16 whose sum is nearly `numbers`."""
    high = numbers.to(tl.bfloat16)
    return high, (numbers - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product(a, b):
    """Return a @ b for a in bf16 or fp32 and b in fp32."""
    high, low = halves(b)
    if a.dtype == tl.bfloat16:
        return tl.dot(a, low, tl.dot(a, high))
    a_high, a_low = halves(a)
    return tl.dot(a_low, high, tl.dot(a_high, low, tl.dot(a_high, high)))


@triton.jit
def inverse(system, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return (I + L)^-1 for a strictly lower L, [TILE, TILE].

    With D, the inverse of the diagonal blocks of I + L, and M = D (L without these blocks), it is
    (I - M) D, as M² = 0 for two blocks. Powers of L would grow too large for keys that repeat.
    """
    COUNT: tl.constexpr = TILE // BLOCK
    block = tl.arange(0, COUNT)
    is_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    parts = tl.reshape(system, (COUNT, BLOCK, COUNT, BLOCK))
    diagonal = tl.sum(tl.where(is_diagonal, parts, 0.0), 2)
    row = tl.arange(0, BLOCK)
    is_one = (row[:, None] == row[None, :]).to(tl.float32)
    solved = tl.zeros((COUNT, BLOCK, BLOCK), tl.float32) + is_one[None, :, :]
    for i in range(1, BLOCK):
        is_row = (row == i)[None, :, None]
        factors = tl.sum(tl.where(is_row, diagonal, 0.0), 1)
        change = tl.sum(factors[:, :, None] * solved, 1)
        solved -= tl.where(is_row, change[:, None, :], 0.0)
    spread = tl.where(is_diagonal, solved[:, :, None, :], 0.0)
    known = tl.reshape(tl.broadcast_to(spread, COUNT, BLOCK, COUNT, BLOCK), (TILE, TILE))
    rest = tl.reshape(tl.where(is_diagonal, 0.0, parts), (TILE, TILE))
    return known - product(product(known, rest), known)


@triton.jit
def load_tile(pointer, tokens, token_stride, shared, is_inside):
    """Return rows [TILE, KEY_DIM] of a key head; zeros outside."""
    places = pointer + (tokens * token_stride)[:, None] + shared[None, :]
    return tl.load(places, mask=is_inside[:, None], other=0)


@triton.jit
def inverse_lengths(rows, eps):
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + eps)


@triton.jit(do_not_specialize=["first_sequence"])
def prepare_tiles_kernel(
    solutions, weights, lengths, query, key, decay, rate, starts, first_sequence,
    num_heads, query_stride, key_stride, length_eps,
    IS_DELTA: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program (i, t, h) computes T, P and the inverse lengths of keys and queries of a tile.

    solutions, weights: [T, heads, TILE]. lengths: [2, T, heads].
    """
    sequence, head = tl.program_id(0) + first_sequence, tl.program_id(2)
    i = tl.arange(0, TILE)
    end = tl.load(starts + sequence + 1)
    tokens = tl.load(starts + sequence) + tl.program_id(1) * TILE + i
    is_inside = tokens < end
    if tl.min(tokens, 0) >= end:
        return
    tokens = tokens.to(tl.int64)
    shared = head // SHARE * KEY_DIM + tl.arange(0, KEY_DIM)
    keys = load_tile(key, tokens, key_stride, shared, is_inside)
    queries = load_tile(query, tokens, query_stride, shared, is_inside)
    gates = tokens * num_heads + head
    total = tl.cumsum(tl.load(decay + gates, mask=is_inside, other=0.0), 0)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    is_past = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(is_past, total[:, None] - total[None, :], float("-inf")))
    products = tl.dot(queries, tl.trans(keys)) * between
    cells = (gates * TILE)[:, None] + i[None, :]
    if IS_DELTA:
        key_length = inverse_lengths(keys, length_eps)
        query_length = inverse_lengths(queries, length_eps) * KEY_DIM**-0.5
        num_gates = tl.load(starts + tl.num_programs(0) + first_sequence).to(tl.int64) * num_heads
        tl.store(lengths + gates, key_length, mask=is_inside)
        tl.store(lengths + num_gates + gates, query_length, mask=is_inside)
        products *= query_length[:, None] * key_length[None, :]
        factors = tl.load(rate + gates, mask=is_inside, other=0.0) * key_length
        system = tl.dot(keys, tl.trans(keys)) * between * factors[:, None] * key_length[None, :]
        system = tl.where(i[:, None] > i[None, :], system, 0.0)
        tl.store(solutions + cells, inverse(system, BLOCK, TILE), mask=is_inside[:, None])
    tl.store(weights + cells, products, mask=is_inside[:, None])


@triton.jit(do_not_specialize=["first_sequence"])
def walk_tiles_kernel(
    out, solutions, weights, lengths, query, key, value, decay, rate, skip, states,
    starts, reads, writes, first_sequence,
    num_heads, query_stride, key_stride, value_stride, slot_stride,
    IS_DELTA: tl.constexpr, SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):
    """Program (i, h, c) computes the c-th columns of the state of head h of a sequence."""
    sequence, head = tl.program_id(0) + first_sequence, tl.program_id(1)
    read = tl.load(reads + sequence)
    dims, i = tl.arange(0, KEY_DIM), tl.arange(0, TILE)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    cells = head * (KEY_DIM * VALUE_DIM) + dims[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(states + read * slot_stride + cells, mask=read >= 0, other=0).to(tl.float32)
    start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    num_gates = tl.load(starts + tl.num_programs(0) + first_sequence).to(tl.int64) * num_heads
    shared = head // SHARE * KEY_DIM + dims
    for tile in range(0, tl.cdiv(end - start, TILE)):
        tokens = (start + tile * TILE + i).to(tl.int64)
        is_inside = tokens < end
        gates = tokens * num_heads + head
        total = tl.cumsum(tl.load(decay + gates, mask=is_inside, other=0.0), 0)
        since_start = tl.exp(total)
        keys = load_tile(key, tokens, key_stride, shared, is_inside)
        places = (tokens * value_stride + head * VALUE_DIM)[:, None] + columns[None, :]
        u = tl.load(value + places, mask=is_inside[:, None], other=0).to(tl.float32)
        added = u
        factors = tl.load(rate + gates, mask=is_inside, other=0.0)
        scale, key_length = since_start, since_start * 0 + 1.0
        scratch = (gates * TILE)[:, None] + i[None, :]
        if IS_DELTA:
            key_length = tl.load(lengths + gates, mask=is_inside, other=0.0)
            scale *= tl.load(lengths + num_gates + gates, mask=is_inside, other=0.0)
            known = product(keys, state)
            u = factors[:, None] * (u - (since_start * key_length)[:, None] * known)
            solution = tl.load(solutions + scratch, mask=is_inside[:, None], other=0.0)
            u = product(solution, u)
        else:
            u *= factors[:, None]
        queries = load_tile(query, tokens, query_stride, shared, is_inside)
        result = scale[:, None] * product(queries, state)
        weight = tl.load(weights + scratch, mask=is_inside[:, None], other=0.0)
        result += product(weight, u)
        if skip is not None:
            result += tl.load(skip + head) * added
        places = (gates * VALUE_DIM)[:, None] + columns[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=is_inside[:, None])
        # States between the tile's tokens, where they are wanted, and then the one after it
        slots = tl.load(writes + tokens, mask=is_inside, other=-1)
        last = tl.min(i, 0) - 1
        num_writes = tl.sum((slots >= 0).to(tl.int32), 0)
        before, place = state, last
        for k in range(0, num_writes + 1):
            is_wanted = (slots >= 0) & (i > place)
            place = tl.min(tl.where(is_wanted, i, TILE - 1), 0)
            if k == num_writes:
                place = TILE - 1
            g = tl.sum(tl.where(i == place, total, 0.0), 0)
            to_place = tl.exp(tl.where(i <= place, g - total, float("-inf"))) * key_length
            state = product(tl.trans(keys), to_place[:, None] * u)
            state += tl.exp(g) * before
            slot = tl.sum(tl.where(i == place, slots, 0), 0)
            if k < num_writes:
                tl.store(states + slot * slot_stride + cells, state.to(states.dtype.element_ty))


def state_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    batch: StateBatch,
    *,
    is_delta: bool,
    skip: Tensor | None = None,
) -> Tensor:
    """Same as `kernels.state.reference.state_tiles`, but for products of 16 bits.

    `kernels.state.state_step` computes decodes, other types than bf16, and keys of more than
    MAX_KEY_DIM units. Raises ValueError as it does.
    """
    check_recurrence(query, key, value, decay, rate, states)
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    tokens, options = (query, key, value, decay, rate), {"is_delta": is_delta, "skip": skip}
    has_tiles = value.dtype == torch.bfloat16 and query.shape[2] <= MAX_KEY_DIM
    first = batch.num_decodes if has_tiles else len(batch.reads)
    run_steps(*tokens, states, batch, out, **options, num_sequences=first)
    count = len(batch.reads) - first
    if not count:
        return out
    longest = max(end - start for start, end in batch.host_spans()[first:])
    plan = _plan(query, key, value, states)
    num_heads, query_stride, key_stride, value_stride, slot_stride = plan.scalars
    numbers = torch.empty(2 if is_delta else 1, *value.shape[:2], TILE, device=value.device)
    lengths = torch.empty(2, *value.shape[:2], device=value.device)
    shape = {"SHARE": plan.options["SHARE"], "KEY_DIM": plan.options["KEY_DIM"], "TILE": TILE}
    prepare_tiles_kernel[count, triton.cdiv(longest, TILE), num_heads](
        numbers[-1], numbers[0], lengths, query, key, decay, rate, batch.starts, first,
        num_heads, query_stride, key_stride, LENGTH_EPS,
        IS_DELTA=is_delta, BLOCK=BLOCK, **shape,
    )
    walk_tiles_kernel[count, *plan.grid](
        out, numbers[-1], numbers[0], lengths, query, key, value, decay, rate, skip, states,
        batch.starts, batch.reads, batch.writes, first,
        num_heads, query_stride, key_stride, value_stride, slot_stride,
        IS_DELTA=is_delta, **plan.options,
    )
    return out


@planned
def _plan(query: Tensor, key: Tensor, value: Tensor, states: Tensor) -> LaunchPlan:
    (_, num_heads, value_dim), key_dim = value.shape, query.shape[2]
    columns = min(COLUMNS, value_dim)
    return LaunchPlan(
        (num_heads, value_dim // columns),
        (num_heads, *(stride(rows, 0) for rows in (query, key, value)), states.stride(0)),
        {
            "SHARE": num_heads // query.shape[1],
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "COLUMNS": columns,
            "TILE": TILE,
        },
    )
