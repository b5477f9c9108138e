"""Collects the scores that can decide the limits of top-k, top-p and typical-p.

There are usually few of them, so finding the limits costs little more than reading the logits once.
A program takes a chunk of a row and appends its candidates to the row's list, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.sampling.token_weights import END_KEY, DrawnRows, key_of, load_scores, weigh

CHUNK = 4096
"""Tokens of a program."""
LANES = 64
"""For a k of up to LANES, top-k needs only the LANES highest scores of each chunk."""
MARGIN = tl.constexpr(0.1)
"""Subtracted from the score below which top-p drops all tokens, so that rounding errors do not
matter."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The scores from which the limits of R drawn rows are found."""

    scores: Tensor
    """[R, vocabulary] fp32: each row's candidates come first; what follows is undefined."""
    counts: Tensor
    """[R] int32: the number of candidates."""
    rests: Tensor
    """[R, chunks] int64: the sum of the weights of the tokens that are not candidates of top-p."""


@triton.jit
def end_of_top_k(scores, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """Return a key above those of the LANES highest scores of a chunk.

    Scores are at most 0, and a lower score has a higher key (see key_of).
    """
    # The lowest of the maxima of LANES groups. Each group has a score that is at least as high, so
    # the LANES highest scores are, too.
    highest = tl.max(tl.reshape(scores, [CHUNK // LANES, LANES]), 0)
    return tl.minimum(key_of(tl.min(highest, 0)) + 1, END_KEY)


@triton.jit
def end_of_top_p(width, top_p):
    """Return a key that top-p never keeps.

    Together, the tokens from this key on have less than the share 1 - p of the mass.
    """
    # The mass of all tokens is at least the mass of the most likely token, whose score is 0. The
    # division is in fp32, as one in fp64 would call a function, which needs a stack.
    score = tl.log((1.0 - top_p).to(tl.float32) / width) - MARGIN
    return tl.minimum(key_of(score), END_KEY)


@triton.jit
def collect_candidates_kernel(
    candidates, counts, rests, logits, token_ids, row_index, temperatures, min_ps, top_ks, top_ps,
    typical_ps, width, row_stride, CHUNK: tl.constexpr, LANES: tl.constexpr,
):
    """Program (r, c) takes chunk c of the r-th drawn row. counts must be 0 before."""
    draw, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p = tl.load(top_ks + draw), tl.load(top_ps + draw)
    has_top_p = (top_k <= 0) & (top_p < 1.0)
    if (top_k <= 0) & (top_p >= 1.0) & (tl.load(typical_ps + draw) >= 1.0):
        return
    row = tl.load(row_index + draw)
    row_logits = logits + row * row_stride
    top = tl.load(row_logits + tl.load(token_ids + row)).to(tl.float32)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = load_scores(row_logits, token, width, top, tl.load(temperatures + draw))
    end_key = tl.full([], END_KEY, tl.int32)
    if (top_k > 0) & (top_k <= LANES):
        end_key = end_of_top_k(scores, CHUNK, LANES)
    if has_top_p:
        end_key = end_of_top_p(width, top_p)
    is_candidate = key_of(scores) < end_key
    if has_top_p:
        rest = tl.where(is_candidate, 0, weigh(scores, tl.load(min_ps + draw)))
        tl.store(rests + draw * tl.num_programs(1) + chunk, tl.sum(rest, 0))
    place = tl.cumsum(is_candidate.to(tl.int32), 0) - 1
    num_candidates = tl.sum(is_candidate.to(tl.int32), 0)
    first = tl.atomic_add(counts + draw, num_candidates, sem="relaxed")
    tl.store(candidates + draw * width + first + place, scores, mask=is_candidate)


def collect_candidates(logits: Tensor, token_ids: Tensor, drawn_rows: DrawnRows) -> Candidates:
    """Return the candidates of the R drawn rows that have top-k, top-p or typical-p.

    logits: [N, vocabulary] in fp32, fp16 or bf16, rows contiguous; token_ids: [N] int64, each row's
    most likely token. Drawn rows without these filters have no candidates. Raises ValueError for
    other shapes, strides and types.
    """
    drawn_rows.check(logits, token_ids)
    num_draws, width = len(drawn_rows.row_index), logits.shape[1]
    num_chunks = triton.cdiv(width, CHUNK)
    candidates = Candidates(
        logits.new_empty((num_draws, width), dtype=torch.float32),
        logits.new_zeros(num_draws, dtype=torch.int32),
        logits.new_empty((num_draws, num_chunks), dtype=torch.int64),
    )
    if num_draws:
        collect_candidates_kernel[num_draws, num_chunks](
            candidates.scores, candidates.counts, candidates.rests, logits, token_ids,
            drawn_rows.row_index, drawn_rows.temperature, drawn_rows.min_p, drawn_rows.top_k,
            drawn_rows.top_p, drawn_rows.typical_p, width, stride(logits, 0),
            CHUNK=CHUNK, LANES=LANES, num_warps=8,
        )
    return candidates
