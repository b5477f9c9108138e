"""The most likely tokens of a place, and the rank of the one that stands there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from core.sampling import TopLogprobs
from engine.sampling.rows import Row, integers
from engine.staging import HostCopy, Parcel

Rank = Callable[[Tensor, Tensor, Tensor], "Ranking"]
"""Takes logits [N, vocabulary], token ids [N] and normalizers [N]; ranks those of the rows that
want it."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Of Q places, each with its token, under the unfiltered model."""

    logprobs: Tensor
    """[Q] fp32, nats: of its token."""
    ranks: Tensor
    """[Q] int64: of its token; 1 is the most likely."""
    top_token_ids: Tensor
    """[Q, K] int64, most likely first."""
    top_logprobs: Tensor
    """[Q, K] fp32, nats."""

    def to_host(self) -> HostRanking:
        """Starts to copy it."""
        return HostRanking(self)


class HostRanking:
    """A ranking on its way to the host."""

    def __init__(self, ranking: Ranking) -> None:
        self._copy = HostCopy(
            [ranking.logprobs, ranking.ranks, ranking.top_token_ids, ranking.top_logprobs]
        )

    def wait(self, widths: Sequence[int]) -> Iterator[TopLogprobs]:
        """widths: of the Q places, how many of their most likely tokens each wants."""
        columns = [tensor.tolist() for tensor in self._copy.wait()]
        for width, logprob, rank, token_ids, logprobs in zip(widths, *columns, strict=True):
            yield TopLogprobs(logprob, rank, tuple(token_ids[:width]), tuple(logprobs[:width]))


def rank(logits: Tensor, token_ids: Tensor, normalizers: Tensor, width: int) -> Ranking:
    """logits: [Q, vocabulary] fp32; token_ids: [Q] int64; normalizers: [Q] fp32, the logarithm of
    the sum of a row's exponentials; width: K, at most the vocabulary's."""
    own = logits.gather(1, token_ids[:, None])
    log_total = normalizers[:, None]
    top, top_token_ids = logits.topk(min(width, logits.shape[1]))
    return Ranking(
        logprobs=(own - log_total)[:, 0],
        ranks=(logits > own).sum(1) + 1,
        top_token_ids=top_token_ids,
        top_logprobs=top - log_total,
    )


def plan_ranking(rows: Sequence[Row], parcel: Parcel) -> Rank | None:
    """Of the rows with `logprobs`, in their order."""
    widths = {place: row.params.logprobs for place, row in enumerate(rows)}
    wanted = {place: width for place, width in widths.items() if width is not None}
    if not wanted:
        return None
    place = parcel.put(integers([*wanted]))
    width = max(wanted.values())

    def apply(logits: Tensor, token_ids: Tensor, normalizers: Tensor) -> Ranking:
        return rank(logits[place()], token_ids[place()], normalizers[place()], width)

    return apply
