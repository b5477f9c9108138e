"""min-p, top-k, top-p and typical-p: weights of what they drop become 0.

Scores are logits over the temperature, the highest of a row being 0, and weights are e to their
power as integers. So sums are exact and what a filter keeps is the same on every path through
this file, in any batch. A token is kept if those before it are short of the wanted mass, and
with it all that are its equals: what is kept depends on no order of sorting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import Row, integers
from engine.staging import Parcel

WEIGHT_OF_ONE = 2.0**44
"""So that 2^18 tokens, all of them the most likely, still have a sum below 2^63."""
MAX_SHORT_K = 128
"""Up to here the highest k are selected; beyond it, and for top-p alone, all are sorted."""

Filter = Callable[[Tensor, Tensor], None]
"""Takes scores [N, vocabulary] and changes their weights [N, vocabulary] in place."""


def weigh(scores: Tensor) -> Tensor:
    """[N, vocabulary] int64, 0 for NaN. Below 2^-44 of the most likely, a token has none."""
    weights = scores.exp().mul_(WEIGHT_OF_ONE)
    return weights.nan_to_num_(0.0).to(torch.int64)


def plan_filters(rows: Sequence[Row], vocab_size: int, parcel: Parcel) -> list[Filter]:
    """In the order in which they apply."""
    params = [row.params for row in rows]
    min_p = [place for place, each in enumerate(params) if each.min_p > 0]
    short = [place for place, each in enumerate(params) if 0 < each.top_k <= MAX_SHORT_K]
    long = [
        place
        for place, each in enumerate(params)
        if each.top_k > MAX_SHORT_K or (each.top_k <= 0 and each.top_p < 1)
    ]
    typical = [place for place, each in enumerate(params) if each.typical_p < 1]
    filters: list[Filter] = []
    if min_p:
        filters.append(_min_p(rows, min_p, parcel))
    if short:
        width = min(vocab_size, max(params[place].top_k for place in short))
        filters.append(_top(rows, short, width, parcel))
    if long:
        filters.append(_top(rows, long, vocab_size, parcel))
    if typical:
        filters.append(_typical(rows, typical, parcel))
    return filters


def _min_p(rows: Sequence[Row], places: list[int], parcel: Parcel) -> Filter:
    """arXiv:2407.01082."""
    place = parcel.put(integers(places))
    share = parcel.put(np.array([[rows[each].params.min_p] for each in places], np.float32))

    def keep(scores: Tensor, weights: Tensor) -> None:
        _drop(weights, place(), scores[place()].exp() < share())

    return keep


def _top(rows: Sequence[Row], places: list[int], width: int, parcel: Parcel) -> Filter:
    """Top-k, then top-p of what it leaves. Only the highest `width` scores of a row are ranked."""
    params = [rows[place].params for place in places]
    place = parcel.put(integers(places))
    counts = [min(each.top_k, width) if each.top_k > 0 else width for each in params]
    last = parcel.put(integers(counts)[:, None] - 1)
    mass = parcel.put(np.array([[each.top_p] for each in params]))

    def keep(scores: Tensor, weights: Tensor) -> None:
        own, own_weights = scores[place()], weights[place()]
        if width < own.shape[1]:
            ranked, order = own.topk(width)
        else:
            ranked, order = own.sort(descending=True)
        lowest = ranked.gather(1, last())
        own_weights.masked_fill_(own < lowest, 0)
        ranked_weights = own_weights.gather(1, order)
        nucleus = _until(ranked, ranked_weights, mass() * own_weights.sum(1, keepdim=True))
        lowest = torch.where(mass() < 1, nucleus, lowest)
        _drop(weights, place(), own < lowest)

    return keep


def _typical(rows: Sequence[Row], places: list[int], parcel: Parcel) -> Filter:
    """arXiv:2202.00666. A token's surprise less the expected one is the mean score less its own."""
    place = parcel.put(integers(places))
    mass = parcel.put(np.array([[rows[each].params.typical_p] for each in places]))

    def keep(scores: Tensor, weights: Tensor) -> None:
        own, own_weights = scores[place()], weights[place()]
        total = own_weights.sum(1, keepdim=True)
        mean = torch.where(own_weights > 0, own * own_weights.double(), 0).sum(1, True) / total
        distance = (own - mean.float()).abs()
        ranked, order = distance.sort()
        farthest = _until(ranked, own_weights.gather(1, order), mass() * total)
        _drop(weights, place(), distance > farthest)

    return keep


def _until(ranked: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """[N, 1]: the first value of each row with which the mass [N, 1] is reached."""
    before = weights.cumsum(1) - weights
    num_kept = (before < mass).sum(1, keepdim=True)
    return ranked.gather(1, num_kept.clamp(min=1) - 1)


def _drop(weights: Tensor, place: Tensor, dropped: Tensor) -> None:
    weights.index_copy_(0, place, weights[place].masked_fill_(dropped, 0))
