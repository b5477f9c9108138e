"""From logits to tokens: all rows at once, each with its own parameters."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sampling import Sampled
from core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Choices:
    """The next token of each row, and its log-probability under the unfiltered model."""

    token_ids: Tensor
    """[N] int64."""
    logprobs: Tensor
    """[N] fp32, nats."""

    def to_host(self) -> list[Sampled]:
        pairs = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [Sampled((token_id,), (logprob,)) for token_id, logprob in pairs]


@torch.inference_mode()
def sample(logits: Tensor, sequences: Rows[Sequence]) -> Choices:
    """logits: [N, vocabulary], one row per sequence, whose newest token it follows."""
    logits = logits.float()
    penalized = _penalize_repetition(logits, sequences)
    token_ids = penalized.argmax(-1)
    random_rows = [row for row, each in enumerate(sequences) if not each.params.is_greedy]
    if random_rows:
        rows = torch.tensor(random_rows, device=logits.device)
        chosen = _sample_random(penalized[rows], [sequences[row] for row in random_rows])
        token_ids[rows] = chosen
    picked = logits.gather(-1, token_ids[:, None])[:, 0]
    return Choices(token_ids, picked - logits.logsumexp(-1))


def _penalize_repetition(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """Divides positive and multiplies negative logits of tokens seen (CTRL, Keskar et al. 2019)."""
    rows = [row for row, each in enumerate(sequences) if each.params.repetition_penalty != 1]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        penalty = sequences[row].params.repetition_penalty
        seen = torch.tensor(sequences[row].token_ids, device=logits.device).unique()
        scores = logits[row, seen]
        logits[row, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    return logits


def _sample_random(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """Inverse-transform sampling: one uniform number per row decides.

    Sorting puts the tokens that top-k and top-p keep in front, so both are a cut.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    params = [sequence.params for sequence in sequences]
    logits = logits / column([each.temperature for each in params])
    ranked, order = logits.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(ranked.shape[-1], device=logits.device)
    top_k = column([each.top_k if each.top_k > 0 else ranked.shape[-1] for each in params])
    probabilities = ranked.masked_fill(rank >= top_k, float("-inf")).softmax(-1).double()
    cumulative = probabilities.cumsum(-1)
    # A token stays while those before it are short of top_p, so the first always does.
    is_kept = cumulative - probabilities < column([each.top_p for each in params])
    is_kept[:, 0] = True  # also where top_p is 0 in fp32
    cumulative = torch.where(is_kept, probabilities, 0).cumsum(-1)
    uniform = torch.from_numpy(_uniform(sequences)).to(logits.device)[:, None]
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    last_kept = (is_kept & (probabilities > 0)).sum(-1, keepdim=True) - 1
    # NOTE: an index out of range, as NaN logits would give, must not end the other rows' step.
    return order.gather(-1, place.minimum(last_kept).clamp_min(0))[:, 0]


def _uniform(sequences: Rows[Sequence]) -> NDArray[np.float64]:
    """A number in [0, 1) for each row, from its seed and position alone.

    So the same seed gives the same tokens in any batch, after preemption, on any device.
    SplitMix64 (Steele, Lea and Flood, 2014) over both.
    """
    seeds = np.array([each.params.seed or 0 for each in sequences], dtype=np.uint64)
    positions = np.array([len(each.token_ids) for each in sequences], dtype=np.uint64)
    bits = _mix(_mix(seeds) + positions)
    return (bits >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix(
    bits: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
