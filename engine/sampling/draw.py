"""One token of each random row: inverse-transform sampling, one uniform number a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.filters import plan_filters, weigh
from engine.sampling.rows import Row, integers
from engine.staging import Parcel

MAX_NUMBERS = 2**24
"""Scores to work on at once, which bounds what a large batch of a large vocabulary takes."""

Draw = Callable[[Tensor, Tensor], None]
"""Takes scores [N, vocabulary] and writes what it draws into token ids [N] int64."""


def plan_draws(rows: Sequence[Row], vocab_size: int, parcel: Parcel) -> list[Draw]:
    """For the rows that are not greedy; these keep the token that they have."""
    places = [place for place, row in enumerate(rows) if not row.params.is_greedy]
    at_once = max(1, MAX_NUMBERS // vocab_size)
    return [
        _plan_draw(rows, places[start : start + at_once], vocab_size, parcel)
        for start in range(0, len(places), at_once)
    ]


def _plan_draw(rows: Sequence[Row], places: list[int], vocab_size: int, parcel: Parcel) -> Draw:
    random = [rows[place] for place in places]
    place = parcel.put(integers(places))
    temperature = parcel.put(np.array([[row.params.temperature] for row in random], np.float32))
    uniform = parcel.put(uniforms(random)[:, None])
    filters = plan_filters(random, vocab_size, parcel)

    def draw(scores: Tensor, token_ids: Tensor) -> None:
        own = scores[place()]
        own.sub_(own.amax(1, keepdim=True)).div_(temperature())
        weights = weigh(own)
        for keep in filters:
            keep(own, weights)
        until = weights.cumsum_(1)
        total = until[:, -1:]
        aim = (uniform() * total).to(torch.int64).minimum(total - 1)
        drawn = torch.searchsorted(until, aim, right=True)
        # Nothing has any weight where all is NaN or impossible: the row keeps its token.
        drawn = torch.where(total > 0, drawn, token_ids[place()][:, None])
        token_ids.index_copy_(0, place(), drawn[:, 0])

    return draw


def uniforms(rows: Sequence[Row]) -> NDArray[np.float64]:
    """A number in [0, 1) for each row, from its seed and position alone.

    So the same seed gives the same tokens in any batch, after preemption, on any device.
    SplitMix64 (Steele, Lea and Flood, 2014) over both.
    """
    seeds = np.array([row.params.seed or 0 for row in rows], dtype=np.uint64)
    positions = np.array([row.num_tokens for row in rows], dtype=np.uint64)
    bits = _mix(_mix(seeds) + positions)
    return (bits >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix(
    bits: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
