"""Finds the most likely tokens of a position, and the rank of the token that is actually there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.sampling import TopLogprobs
from engine.sampling.rows import Row, integers
from engine.staging import HostCopy, Upload

Rank = Callable[[Tensor, Tensor, Tensor], "Ranking"]
"""Takes logits [N, vocabulary], token ids [N] and normalizers [N]. Ranks only the rows that have
`logprobs`."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Logprobs and ranks at Q positions, from logits that no logits processor has changed."""

    logprobs: Tensor
    """[Q] fp32, nats: logprob of the token at each position."""
    ranks: Tensor
    """[Q] int64: rank of the token at each position; 1 is the most likely."""
    top_token_ids: Tensor
    """[Q, K] int64, most likely first."""
    top_logprobs: Tensor
    """[Q, K] fp32, nats."""

    def to_host(self) -> HostRanking:
        """Start a copy to the host. Does not wait."""
        return HostRanking(self)


class HostRanking:
    """A ranking on its way to the host."""

    def __init__(self, ranking: Ranking) -> None:
        self._copy = HostCopy(
            [ranking.logprobs, ranking.ranks, ranking.top_token_ids, ranking.top_logprobs]
        )

    def wait(self, widths: Sequence[int]) -> Iterator[TopLogprobs]:
        """Yield one result per position. widths: how many of the top tokens each one gets."""
        columns = [tensor.tolist() for tensor in self._copy.wait()]
        for width, logprob, rank, token_ids, logprobs in zip(widths, *columns, strict=True):
            yield TopLogprobs(logprob, rank, tuple(token_ids[:width]), tuple(logprobs[:width]))


def rank(logits: Tensor, token_ids: Tensor, normalizers: Tensor, width: int) -> Ranking:
    """Rank the tokens at Q positions.

    logits: [Q, vocabulary] fp32; token_ids: [Q] int64; normalizers: [Q] fp32, each row's logsumexp;
    width: K, reduced to the vocabulary's size.
    """
    token_logits = logits.gather(1, token_ids[:, None])
    log_total = normalizers[:, None]
    top, top_token_ids = _top(logits, min(width, logits.shape[1]))
    return Ranking(
        logprobs=(token_logits - log_total)[:, 0],
        ranks=(logits > token_logits).sum(1) + 1,
        top_token_ids=top_token_ids,
        top_logprobs=top - log_total,
    )


def _top(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the highest logits of each row [Q, width] and their token ids.

    On a CPU, the lower token id wins a tie. In torch, the winner may depend on the width, and
    so on the other requests of the step. Without a tie, nothing is sorted.
    """
    if logits.device.type != "cpu" or not width:
        return logits.topk(width)
    top, token_ids = logits.topk(min(width + 1, logits.shape[1]))
    has_ties = not (top[:, 1:] < top[:, :-1]).all()
    top, token_ids = top[:, :width], token_ids[:, :width]
    if not has_ties:
        return top, token_ids
    rows, token_ids = (~(logits < top[:, -1:])).nonzero(as_tuple=True)
    by_logit = logits[rows, token_ids].sort(descending=True, stable=True).indices
    order = by_logit[rows[by_logit].sort(stable=True).indices]
    counts = rows.bincount(minlength=len(logits))
    starts = counts.cumsum(0) - counts
    return top, token_ids[order][starts[:, None] + torch.arange(width)]


def plan_ranking(rows: Sequence[Row], upload: Upload) -> Rank | None:
    """Plan the ranking of the rows with `logprobs`. Return None if there are none."""
    widths = {index: row.params.logprobs for index, row in enumerate(rows)}
    wanted = {index: width for index, width in widths.items() if width is not None}
    if not wanted:
        return None
    row_index = upload.put(integers([*wanted]))
    width = max(wanted.values())

    def apply(logits: Tensor, token_ids: Tensor, normalizers: Tensor) -> Ranking:
        index = row_index.tensor
        return rank(logits[index], token_ids[index], normalizers[index], width)

    return apply
