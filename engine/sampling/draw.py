"""Draws a token for each non-greedy row: inverse transform sampling, one uniform number per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.filters import plan_filters, weigh
from engine.sampling.rows import Row, integers
from engine.staging import Upload

MAX_SCORES = 2**24
"""Most scores to process at once, which bounds the memory for large batches."""

Draw = Callable[[Tensor, Tensor], None]
"""Takes scores [N, vocabulary] and writes the drawn tokens into token ids [N] int64."""


def plan_draws(rows: Sequence[Row], vocab_size: int, upload: Upload) -> list[Draw]:
    """Plan the draws of the rows that are not greedy. Greedy rows keep their token ids."""
    indices = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    at_once = max(1, MAX_SCORES // vocab_size)
    return [
        _plan_draw(rows, indices[start : start + at_once], vocab_size, upload)
        for start in range(0, len(indices), at_once)
    ]


def _plan_draw(rows: Sequence[Row], indices: list[int], vocab_size: int, upload: Upload) -> Draw:
    random = [rows[index] for index in indices]
    row_index = upload.put(integers(indices))
    temperature = upload.put(np.array([[row.params.temperature] for row in random], np.float32))
    uniform = upload.put(uniforms(random)[:, None])
    filters = plan_filters(random, vocab_size, upload)

    def draw(scores: Tensor, token_ids: Tensor) -> None:
        row_scores = scores[row_index.tensor].float()
        row_scores.sub_(row_scores.amax(1, keepdim=True)).div_(temperature.tensor)
        weights = weigh(row_scores)
        for keep in filters:
            keep(row_scores, weights)
        cumulative = weights.cumsum_(1)
        total = cumulative[:, -1:]
        threshold = (uniform.tensor * total).to(torch.int64).minimum(total - 1)
        tokens = torch.searchsorted(cumulative, threshold, right=True)
        # A row of only NaN or masked tokens has no weight: it keeps its greedy token.
        tokens = torch.where(total > 0, tokens, token_ids[row_index.tensor][:, None])
        token_ids.index_copy_(0, row_index.tensor, tokens[:, 0])

    return draw


def uniforms(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Return a number in [0, 1) per row that depends on its seed and position only.

    So a seed gives the same numbers in any batch, after a preemption and on any device. Hashes both
    with SplitMix64 (Steele, Lea and Flood, 2014).
    """
    seeds = np.array([row.params.seed or 0 for row in rows], dtype=np.uint64)
    positions = np.array([row.num_tokens for row in rows], dtype=np.uint64)
    bits = _mix(_mix(seeds) + positions)
    return (bits >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
