"""Draws a token for each row by inverse transform sampling, without a sum over the whole row.

The first launch sums the weights of each chunk of a row. The second launch multiplies the total by
a uniform random number, which gives a threshold. It finds the chunk in which the running sum passes
the threshold, and then the token in this chunk. Sums are integers, so a sum over the whole row
would find the same token.
`kernels.sampling.token_weights.Limits` explains the keys and scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.sampling.token_weights import DrawnRows, Limits, check_vector, keep, load_scores, weigh

CHUNK = 4096
"""Tokens of a program."""


@triton.jit
def kept_weights(
    logits, token_ids, row_index, temperatures, min_ps,
    max_score_keys, mean_scores, max_distance_keys, draw, token, width, row_stride,
):
    """Return the weights of the tokens `token` of a draw's row: 0 for dropped tokens."""
    row = tl.load(row_index + draw)
    row_logits = logits + row * row_stride
    top = tl.load(row_logits + tl.load(token_ids + row)).to(tl.float32)
    scores = load_scores(row_logits, token, width, top, tl.load(temperatures + draw))
    return keep(
        weigh(scores, tl.load(min_ps + draw)),
        scores,
        tl.load(max_score_keys + draw),
        tl.load(mean_scores + draw),
        tl.load(max_distance_keys + draw),
    )


@triton.jit
def chunk_masses_kernel(
    masses, logits, token_ids, row_index, temperatures, min_ps,
    max_score_keys, mean_scores, max_distance_keys, width, row_stride, CHUNK: tl.constexpr,
):
    """Program (r, c) sums the weights in chunk c of the r-th drawn row into masses [R, chunks]."""
    draw, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    weights = kept_weights(
        logits, token_ids, row_index, temperatures, min_ps,
        max_score_keys, mean_scores, max_distance_keys,
        draw, chunk * CHUNK + tl.arange(0, CHUNK), width, row_stride,
    )
    tl.store(masses + draw * tl.num_programs(1) + chunk, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["num_chunks"])
def draw_tokens_kernel(
    token_ids, masses, uniforms, logits, row_index, temperatures, min_ps,
    max_score_keys, mean_scores, max_distance_keys, width, row_stride, num_chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Program r draws the token of the r-th drawn row.

    CHUNKS: num_chunks, rounded up to a power of two.
    """
    draw = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    mass = tl.load(masses + draw * num_chunks + chunk, mask=chunk < num_chunks, other=0)
    total = tl.sum(mass, 0)
    if total == 0:
        return  # only NaN or masked tokens: the row keeps its token
    threshold = (tl.load(uniforms + draw) * total.to(tl.float64)).to(tl.int64)
    threshold = tl.minimum(threshold, total - 1)
    found = tl.sum((tl.cumsum(mass, 0) <= threshold).to(tl.int32), 0)
    before = tl.sum(tl.where(chunk < found, mass, 0), 0)
    weights = kept_weights(
        logits, token_ids, row_index, temperatures, min_ps,
        max_score_keys, mean_scores, max_distance_keys,
        draw, found * CHUNK + tl.arange(0, CHUNK), width, row_stride,
    )
    is_passed = before + tl.cumsum(weights, 0) <= threshold
    token = found * CHUNK + tl.sum(is_passed.to(tl.int32), 0)
    # All threads have to read the row's most likely token above before one thread overwrites it.
    tl.debug_barrier()
    tl.store(token_ids + tl.load(row_index + draw), token.to(tl.int64))


def draw_tokens(
    logits: Tensor, token_ids: Tensor, drawn_rows: DrawnRows, limits: Limits, uniforms: Tensor
) -> None:
    """Replace the token ids of the drawn rows by tokens that min-p and the limits keep.

    logits: [N, vocabulary] in fp32, fp16 or bf16, rows contiguous; token_ids: [N] int64, each row's
    most likely token; uniforms: [R] fp64 in [0, 1]. A row in which no token has a weight keeps its
    token. Raises ValueError for other shapes, strides and types.
    """
    drawn_rows.check(logits, token_ids)
    num_draws, width = len(drawn_rows.row_index), logits.shape[1]
    for name, tensor, dtype in (
        ("max_score_key", limits.max_score_key, torch.int32),
        ("mean_score", limits.mean_score, torch.float32),
        ("max_distance_key", limits.max_distance_key, torch.int32),
        ("uniforms", uniforms, torch.float64),
    ):
        check_vector(name, tensor, num_draws, dtype)
    if not num_draws:
        return
    num_chunks = triton.cdiv(width, CHUNK)
    masses = logits.new_empty((num_draws, num_chunks), dtype=torch.int64)
    rows = (
        drawn_rows.row_index, drawn_rows.temperature, drawn_rows.min_p,
        limits.max_score_key, limits.mean_score, limits.max_distance_key, width, stride(logits, 0),
    )
    options = {"CHUNK": CHUNK, "num_warps": 8}
    chunk_masses_kernel[num_draws, num_chunks](masses, logits, token_ids, *rows, **options)
    draw_tokens_kernel[num_draws,](
        token_ids, masses, uniforms, logits, *rows, num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks), **options,
    )
