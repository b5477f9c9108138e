"""min-p, top-k, top-p and typical-p: set the weights of dropped tokens to 0.

Scores are logits divided by the temperature, shifted so that a row's highest is 0. Weights are
exp(score), scaled to integers. Their sums are exact, so a filter keeps the same tokens on every
code path and in any batch. A token is kept if the tokens ranked before it do not reach the wanted
mass. Tokens of equal score are kept together, so the result does not depend on how ties are sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import Row, integers
from engine.staging import Upload

WEIGHT_OF_ONE = 2.0**44
"""The weight of a row's most likely token: 2^18 such tokens still sum to less than 2^63."""
MAX_SHORT_K = 128
"""Up to this top_k, `topk` selects the scores; above it, or for top-p alone, all are sorted."""

Filter = Callable[[Tensor, Tensor], None]
"""Takes scores [N, vocabulary] and changes their weights [N, vocabulary] in place."""


def weigh(scores: Tensor) -> Tensor:
    """Return weights [N, vocabulary] int64.

    The weight is 0 for NaN and for tokens less than 2^-44 times as likely as the most likely one.
    """
    weights = scores.exp().mul_(WEIGHT_OF_ONE)
    return weights.nan_to_num_(0.0).to(torch.int64)


def plan_filters(rows: Sequence[Row], vocab_size: int, upload: Upload) -> list[Filter]:
    """Return the filters in the order in which they apply."""
    all_params = [row.params for row in rows]
    min_p = [index for index, params in enumerate(all_params) if params.min_p > 0]
    short = [index for index, params in enumerate(all_params) if 0 < params.top_k <= MAX_SHORT_K]
    long = [
        index
        for index, params in enumerate(all_params)
        if params.top_k > MAX_SHORT_K or (params.top_k <= 0 and params.top_p < 1)
    ]
    typical = [index for index, params in enumerate(all_params) if params.typical_p < 1]
    filters: list[Filter] = []
    if min_p:
        filters.append(_min_p(rows, min_p, upload))
    if short:
        width = min(vocab_size, max(all_params[index].top_k for index in short))
        filters.append(_top(rows, short, width, upload))
    if long:
        filters.append(_top(rows, long, vocab_size, upload))
    if typical:
        filters.append(_typical(rows, typical, upload))
    return filters


def _min_p(rows: Sequence[Row], indices: list[int], upload: Upload) -> Filter:
    """min-p (arXiv:2407.01082)."""
    row_index = upload.put(integers(indices))
    share = upload.put(np.array([[rows[index].params.min_p] for index in indices], np.float32))

    def keep(scores: Tensor, weights: Tensor) -> None:
        _drop(weights, row_index.tensor, scores[row_index.tensor].exp() < share.tensor)

    return keep


def _top(rows: Sequence[Row], indices: list[int], width: int, upload: Upload) -> Filter:
    """top-k, then top-p of what is left. Only the highest `width` scores of a row are ranked."""
    all_params = [rows[index].params for index in indices]
    row_index = upload.put(integers(indices))
    counts = [min(params.top_k, width) if params.top_k > 0 else width for params in all_params]
    last = upload.put(integers(counts)[:, None] - 1)
    mass = upload.put(np.array([[params.top_p] for params in all_params]))

    def keep(scores: Tensor, weights: Tensor) -> None:
        row_scores, row_weights = scores[row_index.tensor], weights[row_index.tensor]
        if width < row_scores.shape[1]:
            ranked, order = row_scores.topk(width)
        else:
            ranked, order = row_scores.sort(descending=True)
        lowest = ranked.gather(1, last.tensor)
        row_weights.masked_fill_(row_scores < lowest, 0)
        ranked_weights = row_weights.gather(1, order)
        nucleus = _value_at_mass(
            ranked, ranked_weights, mass.tensor * row_weights.sum(1, keepdim=True)
        )
        lowest = torch.where(mass.tensor < 1, nucleus, lowest)
        _drop(weights, row_index.tensor, row_scores < lowest)

    return keep


def _typical(rows: Sequence[Row], indices: list[int], upload: Upload) -> Filter:
    """typical-p (arXiv:2202.00666).

    A token's surprise minus the expected surprise equals the mean score minus the token's score.
    """
    row_index = upload.put(integers(indices))
    mass = upload.put(np.array([[rows[index].params.typical_p] for index in indices]))

    def keep(scores: Tensor, weights: Tensor) -> None:
        row_scores, row_weights = scores[row_index.tensor], weights[row_index.tensor]
        total = row_weights.sum(1, keepdim=True)
        mean = (
            torch.where(row_weights > 0, row_scores * row_weights.double(), 0).sum(1, True) / total
        )
        distance = (row_scores - mean.float()).abs()
        ranked, order = distance.sort()
        farthest = _value_at_mass(ranked, row_weights.gather(1, order), mass.tensor * total)
        _drop(weights, row_index.tensor, distance > farthest)

    return keep


def _value_at_mass(ranked: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """Return [N, 1]: each row's first value with which the mass [N, 1] is reached."""
    before = weights.cumsum(1) - weights
    num_kept = (before < mass).sum(1, keepdim=True)
    return ranked.gather(1, num_kept.clamp(min=1) - 1)


def _drop(weights: Tensor, row_index: Tensor, dropped: Tensor) -> None:
    weights.index_copy_(0, row_index, weights[row_index].masked_fill_(dropped, 0))
