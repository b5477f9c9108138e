"""The limits of top-k, top-p and typical-p, found without sorting.

Each filter keeps the tokens up to some key (`kernels.sampling.token_weights.Limits`): the last key
such that the tokens with smaller keys do not reach the wanted count or mass. A program finds the
limits of a row by radix selection (Alabi, Blanchard, Gordon and Steinbach, "Fast k-selection
algorithms for graphics processing units", 2012). A histogram over the keys' leading bits counts
tokens or sums their weights. It shows the digit in which the count or mass is reached. The next
pass looks only at keys with this digit, and at their following bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling.candidates import Candidates
from kernels.sampling.token_weights import (
    END_KEY,
    KEEP_ALL,
    DrawnRows,
    Limits,
    check_vector,
    key_of,
    weigh,
)

TILE = 2048
"""Candidates that a program reads at once."""
BINS = 2048
"""Size of a histogram: a power of two, at least the number of digits in a pass."""
DIGIT_BITS = tl.constexpr(10)
FIRST_SHIFT = tl.constexpr(20)
FIRST_DIGITS, LATER_DIGITS = tl.constexpr(1056), tl.constexpr(1024)
"""Number of values of the first digit, up to the digit of END_KEY, and of the two later digits."""
COUNT, MASS, DISTANCE = (tl.constexpr(number) for number in range(3))
"""What `find_limit` sums up, and by which key. COUNT: the number of tokens, by score. MASS: their
weights, by score. DISTANCE: their weights, by the distance of the score from the mean."""


@triton.jit
def clear(histogram, BINS: tl.constexpr):
    # The first barrier waits until all threads have read the histogram; the second until all have
    # cleared their part.
    tl.debug_barrier()
    tl.store(histogram + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))
    tl.debug_barrier()


@triton.jit
def find_digit(histogram, before, target, shift, BINS: tl.constexpr):
    """Return the last digit before which the sum is below `target`, and that sum.

    before: the sum over the keys before the histogram's first digit.
    """
    tl.debug_barrier()
    digit = tl.arange(0, BINS)
    # NOTE: atomic adds happen in the L2 cache, so this load must not come from the L1 cache.
    sums = tl.load(histogram + digit, cache_modifier=".cg")
    reached = before + tl.cumsum(sums, 0) - sums
    num_digits = tl.where(shift == FIRST_SHIFT, FIRST_DIGITS, LATER_DIGITS)
    is_less = (digit < num_digits) & (reached.to(tl.float64) < target)
    found = tl.maximum(tl.sum(is_less.to(tl.int32), 0) - 1, 0)
    return found, tl.sum(tl.where(digit == found, reached, 0), 0)


@triton.jit
def find_limit(
    histogram, candidates, num_candidates, rest, min_p, wanted, score_limit, mean,
    KIND: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr,
):
    """Return the last key that is kept.

    wanted: for COUNT, a number of tokens. Otherwise a share of the mass, which is `rest` plus the
    weights of the candidates up to score_limit.
    """
    before = tl.full([], 0, tl.int64)
    first_key, end_key = tl.full([], 0, tl.int32), tl.full([], END_KEY, tl.int32)
    shift = tl.full([], FIRST_SHIFT, tl.int32)
    while shift >= 0:
        clear(histogram, BINS)
        mass = tl.zeros([TILE], tl.int64)
        for start in range(0, num_candidates, TILE):
            place = start + tl.arange(0, TILE)
            is_inside = place < num_candidates
            scores = tl.load(candidates + place, mask=is_inside, other=float("-inf"))
            keys = key_of(scores)
            if KIND == COUNT:
                amounts = is_inside.to(tl.int64)
            else:
                amounts = tl.where(keys <= score_limit, weigh(scores, min_p), 0)
                mass += amounts
            if KIND == DISTANCE:
                keys = key_of(scores - mean)
            is_counted = (keys >= first_key) & (keys < end_key) & (amounts > 0)
            digit = (keys - first_key) >> shift
            tl.atomic_add(histogram + digit, amounts, mask=is_counted, sem="relaxed")
        target = wanted
        if KIND != COUNT:
            target = wanted * (rest + tl.sum(mass, 0)).to(tl.float64)
        digit, before = find_digit(histogram, before, target, shift, BINS)
        first_key += digit << shift
        end_key = first_key + (1 << shift)
        shift -= DIGIT_BITS
    return first_key


@triton.jit
def mean_score(candidates, num_candidates, min_p, score_limit, TILE: tl.constexpr):
    """Return the weighted mean of the scores up to score_limit."""
    mass = tl.zeros([TILE], tl.int64)
    moment = tl.zeros([TILE], tl.float64)
    for start in range(0, num_candidates, TILE):
        place = start + tl.arange(0, TILE)
        scores = tl.load(candidates + place, mask=place < num_candidates, other=float("-inf"))
        weights = tl.where(key_of(scores) <= score_limit, weigh(scores, min_p), 0)
        mass += weights
        moment += tl.where(weights > 0, scores.to(tl.float64) * weights.to(tl.float64), 0.0)
    return (tl.sum(moment, 0) / tl.sum(mass, 0).to(tl.float64)).to(tl.float32)


@triton.jit(do_not_specialize=["num_chunks"])
def filter_limits_kernel(
    max_score_keys, mean_scores, max_distance_keys, histograms, candidates, counts, rests,
    min_ps, top_ks, top_ps, typical_ps, width, num_chunks,
    KEEP_ALL: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr,
):
    """Program r finds the limits of the r-th drawn row.

    histograms: [R, BINS] int64, may be uninitialized. CHUNKS: num_chunks, rounded up to a power of
    two.
    """
    draw = tl.program_id(0).to(tl.int64)
    min_p, top_k = tl.load(min_ps + draw), tl.load(top_ks + draw)
    top_p, typical_p = tl.load(top_ps + draw), tl.load(typical_ps + draw)
    histogram = histograms + draw * BINS
    candidates += draw * width
    count = tl.load(counts + draw)
    nothing = tl.full([], 0, tl.int64)
    score_limit, distance_limit, mean = KEEP_ALL, KEEP_ALL, 0.0
    if top_k > 0:
        score_limit = find_limit(
            histogram, candidates, count, nothing, min_p, top_k, KEEP_ALL, 0.0, COUNT, TILE, BINS
        )
    if top_p < 1.0:
        rest = nothing
        if top_k <= 0:
            chunk = tl.arange(0, CHUNKS)
            rest = tl.load(rests + draw * num_chunks + chunk, mask=chunk < num_chunks, other=0)
            rest = tl.sum(rest, 0)
        score_limit = find_limit(
            histogram, candidates, count, rest, min_p, top_p, score_limit, 0.0, MASS, TILE, BINS
        )
    if typical_p < 1.0:
        mean = mean_score(candidates, count, min_p, score_limit, TILE)
        distance_limit = find_limit(
            histogram, candidates, count, nothing, min_p, typical_p, score_limit, mean,
            DISTANCE, TILE, BINS,
        )
    tl.store(max_score_keys + draw, score_limit)
    tl.store(mean_scores + draw, mean)
    tl.store(max_distance_keys + draw, distance_limit)


def filter_limits(candidates: Candidates, drawn_rows: DrawnRows) -> Limits:
    """Return which tokens top-k, then top-p, then typical-p keep in each of the R drawn rows.

    min-p applies before top-p. Tokens of equal score are kept or dropped together. Raises
    ValueError unless the candidates belong to `drawn_rows`.
    """
    num_draws = len(drawn_rows.row_index)
    check_vector("counts", candidates.counts, num_draws, torch.int32)
    max_score_keys, max_distance_keys = (candidates.counts.new_empty(num_draws) for _ in range(2))
    means = candidates.scores.new_empty(num_draws)
    num_chunks = candidates.rests.shape[1]
    if num_draws:
        filter_limits_kernel[num_draws,](
            max_score_keys, means, max_distance_keys,
            candidates.rests.new_empty((num_draws, BINS)),
            candidates.scores, candidates.counts, candidates.rests,
            drawn_rows.min_p, drawn_rows.top_k, drawn_rows.top_p, drawn_rows.typical_p,
            candidates.scores.shape[1], num_chunks, KEEP_ALL=KEEP_ALL,
            CHUNKS=triton.next_power_of_2(num_chunks), TILE=TILE, BINS=BINS, num_warps=8,
        )
    return Limits(max_score_keys, means, max_distance_keys)
