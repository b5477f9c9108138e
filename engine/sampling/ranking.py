"""Finds the most likely tokens of a position, and the rank of the token that is actually there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from core.sampling import Sampled, SequenceFailure, TopLogprobs
from engine.sampling.rows import Row, Settle, integers
from engine.staging import HostCopy, Upload


class Ranking:
    """Logprobs and ranks at Q positions, from logits that no logits processor has changed."""

    def __init__(self, logprobs: Tensor, ranks: Tensor, top_ids: Tensor, top: Tensor) -> None:
        """Start a copy to the host. Does not wait.

        logprobs: [Q] fp32, nats, of the token at each position; ranks: [Q] int64, of this token, 1
        is the most likely; top_ids: [Q, K] int64, most likely first; top: [Q, K], their logprobs.
        """
        self._copy = HostCopy([logprobs, ranks, top_ids, top])

    def wait(self, widths: Sequence[int]) -> Iterator[TopLogprobs]:
        """Yield one result per position. widths: how many of the top tokens each one gets."""
        columns = [tensor.tolist() for tensor in self._copy.wait()]
        for width, logprob, rank, token_ids, logprobs in zip(widths, *columns, strict=True):
            yield TopLogprobs(logprob, rank, tuple(token_ids[:width]), tuple(logprobs[:width]))


def rank(logits: Tensor, token_ids: Tensor, normalizers: Tensor, width: int) -> Ranking:
    """Rank the tokens at Q positions, and start a copy of the ranking to the host.

    logits: [Q, vocabulary] fp32; token_ids: [Q] int64; normalizers: [Q] fp32, each row's logsumexp;
    width: K, reduced to the vocabulary's size.
    """
    token_logits = logits.gather(1, token_ids[:, None])
    log_total = normalizers[:, None]
    top, top_token_ids = _top(logits, min(width, logits.shape[1]))
    ranks = (logits > token_logits).sum(1) + 1
    return Ranking((token_logits - log_total)[:, 0], ranks, top_token_ids, top - log_total)


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


class RankedRows:
    """The rows of a step that have `logprobs`."""

    def __init__(self, rows: Sequence[Row], upload: Upload) -> None:
        self._widths = {
            index: row.params.logprobs
            for index, row in enumerate(rows)
            if row.params.logprobs is not None
        }
        self._row_index = upload.put(integers([*self._widths]))

    def start(self, logits: Tensor, token_ids: Tensor, normalizers: Tensor) -> Settle:
        """Rank the tokens [N] of all rows, without waiting. Return what adds the results.

        logits: [N, vocabulary] fp32; normalizers: [N] fp32.
        """
        index = self._row_index.tensor
        width = max(self._widths.values())
        ranking = rank(logits[index], token_ids[index], normalizers[index], width)

        def settle(sampled: list[Sampled | SequenceFailure]) -> None:
            top = ranking.wait([*self._widths.values()])
            for row, best in zip(self._widths, top, strict=True):
                sample = sampled[row]
                assert isinstance(sample, Sampled)
                sampled[row] = Sampled(sample.token_ids, sample.logprobs, (best,))

        return settle
