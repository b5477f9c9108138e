"""Attention whose V is normed, and whose K and V may be one projection or another layer's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.attention.call import AttentionCall, PagedAttention, Rotation
from engine.model.heads import elements_of, qkv_sources
from engine.model.layer import Attention
from engine.model.loader import Loader, Source
from engine.model.norms import Norm, RMSNorm, norm_of_all_heads
from engine.model.rotary import Angles, Rotary, StepAngles
from engine.model.spec import DecoderSpec
from kernels.cpu.calls import NoKernelError
from kernels.cpu.step_calls import StepCalls

FOLDED = "folded"
"""Key in `StepAngles.by_rope` of the angles that are not always 0."""


class Gemma4Attention(Attention):
    """Self-attention over the KV cache. Every head of q, k and v is normed, v without weights.

    ```
    layer            | projections | K, V of the KV cache
    most             | q, k, v     | norm(k) rotated, norm(v)
    K folded into V  | q, k        | norm(k) rotated, norm(k) without weights
    shared           | q           | those of the layer's source
    ```

    If K is folded into V, they only differ in the few dims that are rotated. The others are kept
    once, as V's: the weights of K's norm are applied to them in the query instead.

    ```
    order of dims  | rotated, as V | not rotated          | rotated, as K |
                                   <--- K, and queries ------------------->
                   <--- V -------------------------------->
    ```
    """

    def __init__(
        self, loader: Loader, spec: DecoderSpec, index: int, name: str, rotary: Rotary
    ) -> None:
        layer = spec.layers[index]
        config: Any = spec.config
        dim = layer.head_dim
        self.spec, self.index, self.layer, self.dim = spec, spec.cache_index(index), layer, dim
        self._rope = layer.rope or ""
        self.rotary_dim = rotary.width(self._rope)
        heads = loader.shard.heads(spec.num_heads, layer.num_kv_heads)
        self._num_kv_heads = len(heads.keys)
        self._is_shared = layer.source is not None
        is_full = config.layer_types[index] == "full_attention"
        self._is_folded = config.attention_k_eq_v and is_full and not self._is_shared
        count = 1 if self._is_shared else 2 if self._is_folded else 3
        self._counts = [len(part) for part in (heads.queries, heads.keys, heads.keys)][:count]
        self._shared_dim = shared = layer.shared_dim
        order = _rotated_last(dim, shared, self.rotary_dim // 2) if shared else None
        self.qkv = loader.linear(
            qkv_sources(spec, layer, name, heads, order)[:count], spec.hidden_size
        )
        self.out = loader.linear(
            [Source(f"{name}.{spec.family.out}", spec.hidden_size)],
            spec.num_heads * dim,
            columns=elements_of(heads.queries, dim),
        )
        kind, eps = spec.family.norm, spec.norm_eps
        self.norms: list[Norm] = [
            loader.norm(f"{name}.{norm}", (dim,), kind, eps, order)
            for norm in spec.family.qk_norm_names[: min(count, 2)]
        ]
        self._value_order: Tensor | None = None
        """Where attention's output has each dim of V."""
        if order is not None:
            _move_weights(self.norms[0], self.norms[1], shared)
            self._value_order = order.roll(dim - shared).argsort().to(loader.device)
        ones = torch.ones(dim, device=loader.device, dtype=loader.dtype)
        self._value_norm = RMSNorm(ones, eps, kind, loader.elementwise)
        if count == 3:
            self.norms.append(self._value_norm)
        self._norm_all = norm_of_all_heads(self.norms, self._counts)
        """Norms all heads together, as they lie side by side in memory."""
        self._rotate = loader.elementwise.rotary

    def __call__(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        projected = self.qkv(hidden).unflatten(-1, (-1, self.dim))
        normed = self._normed(projected)
        query, rotation = normed[0], Rotation(*angles.by_rope[self._rope], self.rotary_dim)
        if self._is_shared:
            self._rotate(query, query[:, :0], *rotation)
            key = value = query[:, : self._num_kv_heads]
            rotation = None
        elif self._is_folded:
            key = normed[1]
            value = self._value_norm(projected[:, self._counts[0] :])[..., self._shared_dim :]
            if self._shared_dim:
                folded = angles.by_rope[FOLDED]
                parts = query[..., self._shared_dim :], key[..., self._shared_dim :]
                self._rotate(*parts, *folded, self.dim - self._shared_dim)
                rotation = None
        else:
            key, value = normed[1:]
        call = AttentionCall(
            layer=self.index,
            query=query,
            key=key,
            value=value,
            scale=self.layer.scale,
            window=self.layer.window,
            softcap=None,
            sinks=None,
            rotation=rotation,
            is_shared=self._is_shared,
            shared_dim=self._shared_dim,
        )
        attended = paged.attend(call)
        if rows is not None:
            attended = attended.index_select(0, rows)
        if self._value_order is not None:
            attended = attended.index_select(2, self._value_order)
        return self.out(attended.flatten(1))

    def _normed(self, projected: Tensor) -> list[Tensor]:
        """Return the normed heads of each projection. projected: [T, heads, dim], of all."""
        if self._norm_all is not None:
            return list(self._norm_all(projected).split_with_sizes(self._counts, 1))
        parts = projected.split_with_sizes(self._counts, 1)
        return [norm(part) for norm, part in zip(self.norms, parts, strict=True)]

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Raise NoKernelError: the layers run one after another."""
        raise NoKernelError("its attention is Gemma 4's")


def folded_angles(spec: DecoderSpec, angles: StepAngles) -> StepAngles:
    """Add the angles of the dims that rotate, if the model folds K into V."""
    layer = next((layer for layer in spec.layers if layer.shared_dim), None)
    if layer is None:
        return angles
    num_pairs = (layer.head_dim - layer.shared_dim) // 2
    cos, sin = (part[:, :num_pairs].contiguous() for part in angles.by_rope[layer.rope or ""])
    return angles._replace(by_rope={**angles.by_rope, FOLDED: Angles(cos, sin)})


def _rotated_last(dim: int, num_still: int, half: int) -> Tensor:
    """Return the permutation [dim] int64 of a head's dims that puts those that rotate last.

    They are the first of each half, which rotate together. num_still: the number of the others.
    """
    firsts = torch.arange((dim - num_still) // 2)
    rotated = torch.cat([firsts, half + firsts])
    is_still = torch.ones(dim, dtype=torch.bool).index_fill(0, rotated, False)
    return torch.cat([is_still.nonzero().flatten(), rotated])


def _move_weights(query: Norm, key: Norm, count: int) -> None:
    """Multiply the first dims of queries by the weights of K's norm, instead of those of K."""
    assert isinstance(query, RMSNorm)
    assert isinstance(key, RMSNorm)
    query.weight[:count] *= key.weight[:count]
    key.weight[:count] = 1.0
