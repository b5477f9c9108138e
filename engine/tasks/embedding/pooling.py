"""Pool token vectors into one vector per text, as sentence-transformers does.

SPLADE (Formal et al., 2021) pools logits of a masked-LM head, into mostly zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from core.configuration.options import Pooling

Pool = Callable[[Tensor, Tensor], Tensor]
"""Maps hidden [texts, tokens, size] in fp32 and a 0/1 mask [texts, tokens] to [texts, size]."""


def pool(kinds: tuple[Pooling, ...], hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the pooled vectors [texts, kinds * size], concatenating the kinds in their order."""
    hidden = hidden.float()
    return torch.cat([_POOLS[kind](hidden, mask) for kind in kinds], dim=-1)


def _sum(hidden: Tensor, weights: Tensor) -> Tensor:
    return (hidden * weights[:, :, None]).sum(1)


def _weighted_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average, weighting later tokens more, as SGPT does for decoders (Muennighoff 2022)."""
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return _sum(hidden, weights) / weights.sum(1, keepdim=True)


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]


_POOLS: Mapping[Pooling, Pool] = {
    "cls": lambda hidden, mask: hidden[:, 0],
    "max": lambda hidden, mask: hidden.masked_fill(mask[:, :, None] == 0, -torch.inf).amax(1),
    "mean": lambda hidden, mask: _sum(hidden, mask) / mask.sum(1, keepdim=True),
    "mean_sqrt_len_tokens": lambda hidden, mask: (
        _sum(hidden, mask) / mask.sum(1, keepdim=True).sqrt()
    ),
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
    "splade": lambda logits, mask: _POOLS["max"](logits, mask).relu().log1p(),
}
