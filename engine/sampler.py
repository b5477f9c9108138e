"""From logits to tokens: all rows at once, each with its own parameters, nothing waited for."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sampling import Sampled
from core.sequence import Sequence
from engine.staging import Staging


@dataclass(frozen=True, slots=True)
class Row:
    """Whose next token is drawn, and after how many tokens; the newest may be in flight."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Choices:
    """The next token of each row, and its log-probability under the unfiltered model."""

    token_ids: Tensor
    """[N] int64."""
    logprobs: Tensor
    """[N] fp32, nats."""

    def to_host(self) -> HostChoices:
        """Starts to copy them."""
        return HostChoices(self)


class HostChoices:
    """Choices on their way to the host."""

    def __init__(self, choices: Choices) -> None:
        self._token_ids = _start_copy(choices.token_ids)
        self._logprobs = _start_copy(choices.logprobs)
        self._copied = torch.cuda.Event() if choices.token_ids.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[Sampled]:
        if self._copied is not None:
            self._copied.synchronize()
        pairs = zip(self._token_ids.tolist(), self._logprobs.tolist(), strict=True)
        return [Sampled((token_id,), (logprob,)) for token_id, logprob in pairs]


class Sampler:
    """Chooses tokens on the device where the logits are."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Rows[Row], newest: Tensor) -> Choices:
        """logits: [N, vocabulary], left as they are; newest: [N] int64, the token each follows."""
        logits = logits.float()
        penalized = self._penalize_repetition(logits, rows, newest)
        token_ids = penalized.argmax(-1)
        random = [place for place, row in enumerate(rows) if not row.sequence.params.is_greedy]
        if random:
            self._sample_random(penalized, [rows[place] for place in random], random, token_ids)
        picked = logits.gather(-1, token_ids[:, None])[:, 0]
        return Choices(token_ids, picked - logits.logsumexp(-1))

    def _penalize_repetition(self, logits: Tensor, rows: Rows[Row], newest: Tensor) -> Tensor:
        """Divides positive and multiplies negative logits of tokens seen (CTRL, 2019)."""
        places = [
            place for place, row in enumerate(rows) if row.sequence.params.repetition_penalty != 1
        ]
        if not places:
            return logits
        vocab_size = logits.shape[1]
        penalized = [rows[place] for place in places]
        place, penalty, history = self._staging.upload(
            [
                np.array(places),
                np.array([row.sequence.params.repetition_penalty for row in penalized], np.float32),
                _histories(penalized, fill=vocab_size),
            ]
        )
        seen = torch.zeros(len(places), vocab_size + 1, dtype=torch.bool, device=logits.device)
        seen.scatter_(1, history, True).scatter_(1, newest[place][:, None], True)
        scores, penalty = logits[place], penalty[:, None]
        changed = torch.where(scores > 0, scores / penalty, scores * penalty)
        return logits.index_copy(0, place, torch.where(seen[:, :vocab_size], changed, scores))

    def _sample_random(
        self, logits: Tensor, rows: Rows[Row], places: list[int], token_ids: Tensor
    ) -> None:
        """Inverse-transform sampling: one uniform number per row decides. Changes token_ids.

        Sorting puts the tokens that top-k and top-p keep in front, so both are a cut.
        """
        params = [row.sequence.params for row in rows]
        vocab_size = logits.shape[1]
        place, temperature, top_k, top_p, uniform = self._staging.upload(
            [
                np.array(places),
                np.array([each.temperature for each in params], np.float32)[:, None],
                np.array([each.top_k if each.top_k > 0 else vocab_size for each in params])[
                    :, None
                ],
                np.array([each.top_p for each in params], np.float32)[:, None],
                _uniform(rows)[:, None],
            ]
        )
        ranked, order = (logits[place] / temperature).sort(stable=True, dim=-1, descending=True)
        rank = torch.arange(vocab_size, device=logits.device)
        probabilities = ranked.masked_fill(rank >= top_k, float("-inf")).softmax(-1).double()
        cumulative = probabilities.cumsum(-1)
        # A token stays while those before it are short of top_p, so the first always does.
        is_kept = cumulative - probabilities < top_p
        is_kept[:, 0] = True  # also where top_p is 0 in fp32
        cumulative = torch.where(is_kept, probabilities, 0).cumsum(-1)
        chosen = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        last_kept = (is_kept & (probabilities > 0)).sum(-1, keepdim=True) - 1
        # NOTE: an index out of range, as NaN logits would give, must not end the other rows' step.
        chosen = chosen.minimum(last_kept).clamp_min(0)
        token_ids.index_copy_(0, place, order.gather(-1, chosen)[:, 0])


def _start_copy(tensor: Tensor) -> Tensor:
    """Its contents on the host, once the device has come so far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _histories(rows: Rows[Row], fill: int) -> NDArray[np.int64]:
    """[N, L]: every token but the newest, which may be in flight."""
    longest = max(row.num_tokens for row in rows) - 1
    histories = np.full((len(rows), longest), fill)
    for place, row in enumerate(rows):
        histories[place, : row.num_tokens - 1] = row.sequence.token_ids[: row.num_tokens - 1]
    return histories


def _uniform(rows: Rows[Row]) -> NDArray[np.float64]:
    """A number in [0, 1) for each row, from its seed and position alone.

    So the same seed gives the same tokens in any batch, after preemption, on any device.
    SplitMix64 (Steele, Lea and Flood, 2014) over both.
    """
    seeds = np.array([row.sequence.params.seed or 0 for row in rows], dtype=np.uint64)
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
