"""The most likely token and the log-sum-exp of each row of logits, which is read once.

A program takes a chunk of a row, so that even a few rows use the whole GPU. Chunks do not depend on
the batch, so a row's result is bitwise the same in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch_plan import LaunchPlan, planned
from kernels.sampling.token_weights import check_logits

CHUNK = 4096
"""Tokens of a program: 16 KB in fp32. Several such programs fit on a multiprocessor."""


@triton.jit
def ordered(numbers):
    """Return int32 of the same order as the fp32 numbers; NaN is the greatest, as in argmax."""
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(numbers != numbers, 0x7FFFFFFF, order)


@triton.jit
def finite(number):
    """Return the number, or 0 if it is infinite."""
    return tl.where(tl.abs(number) == float("inf"), 0.0, number)


@triton.jit
def best_of_chunk_kernel(
    orders, tokens, tops, sums, logits, width, row_stride, CHUNK: tl.constexpr
):
    """Program (n, c) takes chunk c of row n. Outputs are [N, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    numbers = tl.load(logits + row * row_stride + token, mask=token < width, other=float("-inf"))
    numbers = numbers.to(tl.float32)
    order, best = tl.max(ordered(numbers), 0, return_indices=True)
    top = tl.max(numbers, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(orders + place, order)
    tl.store(tokens + place, chunk * CHUNK + best)
    tl.store(tops + place, top)
    tl.store(sums + place, tl.sum(tl.exp(numbers - finite(top)), 0))


@triton.jit(do_not_specialize=["num_chunks"])
def best_of_row_kernel(
    best_tokens, normalizers, orders, tokens, tops, sums, num_chunks, CHUNKS: tl.constexpr
):
    """Program n combines the chunks of row n.

    CHUNKS: num_chunks, rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    place = row * num_chunks + chunk
    order = tl.load(orders + place, mask=is_chunk, other=-0x80000000)
    _, best = tl.max(order, 0, return_indices=True)
    tl.store(best_tokens + row, tl.load(tokens + row * num_chunks + best).to(tl.int64))
    chunk_top = tl.load(tops + place, mask=is_chunk, other=float("-inf"))
    chunk_sum = tl.load(sums + place, mask=is_chunk, other=0.0)
    top = finite(tl.max(chunk_top, 0))
    # A chunk's sum is relative to its top, or to 0 if the top is infinite.
    relative = tl.where(chunk_top == float("inf"), 0.0, chunk_top)
    total = tl.sum(chunk_sum * tl.exp(relative - top), 0)
    tl.store(normalizers + row, tl.log(total) + top)


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's argmax, [N] int64, and log-sum-exp in nats, [N] fp32.

    logits: [N, vocabulary] in fp32, fp16 or bf16, rows contiguous. The first token wins a tie, and
    NaN is greater than any number. Raises ValueError for other shapes, strides and types.
    """
    plan, num_chunks = _plan(logits)
    num_rows = logits.shape[0]
    best = logits.new_empty(num_rows, dtype=torch.int64)
    normalizers = logits.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        size = (num_rows, num_chunks)
        orders, tokens = (logits.new_empty(size, dtype=torch.int32) for _ in range(2))
        tops, sums = (logits.new_empty(size, dtype=torch.float32) for _ in range(2))
        best_of_chunk_kernel[plan.grid](
            orders, tokens, tops, sums, logits, *plan.scalars, **plan.options
        )
        best_of_row_kernel[(num_rows,)](
            best, normalizers, orders, tokens, tops, sums, num_chunks,
            CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1,
        )
    return best, normalizers


@planned
def _plan(logits: Tensor) -> tuple[LaunchPlan, int]:
    check_logits(logits)
    num_rows, width = logits.shape
    num_chunks = -(-width // CHUNK)
    options = {"CHUNK": CHUNK, "num_warps": 8}
    # Also of a single row: the stride's alignment decides how numbers lie in registers, and with it
    # the order of sums.
    return LaunchPlan((num_rows, num_chunks), (width, logits.stride(0)), options), num_chunks
