"""The router of a mixture: the experts of each token and their weights in the sum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engine.model.families import ExpertNames
from engine.model.loader import Loader, Source
from engine.model.published.settings import of_layer
from engine.model.spec import DecoderSpec


class Router:
    """Scores every expert for each token, and chooses the top k.

    Nothing synchronizes with the device, and a token's choice depends on no other token.
    """

    def __init__(
        self, loader: Loader, spec: DecoderSpec, index: int, block: str, names: ExpertNames
    ) -> None:
        """index: of the layer. block: the mixture's name in the checkpoint."""
        config: Any = spec.config
        self.num_experts: int = getattr(config, "num_local_experts", None) or config.num_experts
        self.top_k: int = of_layer(getattr(config, names.top_k), index)
        self._score = names.score
        if names.score == "by config":
            is_sigmoid = config.expert_selection_fn == "sigmoid"
            self._score = "sigmoid" if is_sigmoid else "softmax of top k"
        self._normalizes = names.always_normalizes or getattr(config, "norm_topk_prob", False)
        self._scaling: float = getattr(config, names.scaling, None) or 1.0
        self._group_score, self._least_sum = names.group_score, names.least_sum
        self._num_groups, self._num_kept = _groups(config)
        self._in_fp32 = names.routes_in_fp32
        self._linear = loader.linear(
            [Source(f"{block}.{names.router}", self.num_experts)],
            spec.hidden_size,
            is_adaptable=False,
            may_quantize=False,
            dtype=torch.float32 if self._in_fp32 else None,
        )
        self._bias: Tensor | None = None
        if names.bias and getattr(config, "use_expert_bias", True):
            self._bias = loader.fp32(f"{block}.{names.bias}", self.num_experts)
        self._sigmoid = loader.elementwise.sigmoid
        self._jitter: float = getattr(config, "router_jitter_noise", 0.0)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores [T, top_k] in the rows' dtype and expert ids [T, top_k] int64."""
        logits = self._linear(rows.float() if self._in_fp32 else rows).float()
        scores, chosen = self._choose(logits)
        if self._scaling != 1.0:
            scores = scores * self._scaling
        return scores.to(rows.dtype), chosen

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self._score == "sparse mixer":
            return self._mix(logits)
        if self._score == "softmax of top k":
            best, chosen = logits.topk(self.top_k, -1)
            return best.softmax(-1), chosen
        is_sigmoid = self._score == "sigmoid"
        scores = self._sigmoid(logits) if is_sigmoid else logits.softmax(-1)
        if self._bias is None and self._num_groups == 1:
            best, chosen = scores.topk(self.top_k, -1)
        else:
            chosen = self._ranked(scores).topk(self.top_k, -1).indices
            best = scores.gather(1, chosen)
        if self._normalizes:
            total = best.sum(-1, keepdim=True)
            best = best / (total + self._least_sum if is_sigmoid else total)
        return best, chosen

    def _ranked(self, scores: Tensor) -> Tensor:
        """Return what the choice depends on, [T, experts]: with the bias, and -inf in the groups
        of experts that are not among the best."""
        ranked = scores if self._bias is None else scores + self._bias
        if self._num_groups == 1:
            return ranked
        groups = ranked.unflatten(-1, (self._num_groups, -1))
        two = self._group_score == "two best"
        best = groups.topk(2, -1).values.sum(-1) if two else groups.amax(-1)
        kept = best.topk(self._num_kept, -1).indices
        is_dropped = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        return groups.masked_fill(is_dropped[..., None], -math.inf).flatten(1)

    def _mix(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose one expert after another; each weighs as in a softmax of those still to choose
        that are close to it (SparseMixer, Phi-3.5-MoE)."""
        scores, chosen = [], []
        left = logits
        for _ in range(self.top_k):
            best, expert = left.max(-1, keepdim=True)
            is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * self._jitter
            scores.append(left.masked_fill(is_far, -math.inf).softmax(-1).gather(1, expert))
            chosen.append(expert)
            left = left.scatter(1, expert, -math.inf)
        return torch.cat(scores, -1), torch.cat(chosen, -1)


def _groups(config: Any) -> tuple[int, int]:
    """Return the number of groups of experts, and how many of them a token may choose from."""
    if getattr(config, "topk_method", "") == "greedy":
        return 1, 1
    return getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
