"""The gated delta net of Qwen3-Next and Qwen3.5 (arXiv 2412.06464): see `kernels.state.reference`.

```
q | k | v   convolution, silu ──▶ recurrence ──▶ norm of each head ──▶ * silu(z) ──▶ out
z | b | a   b: rate = sigmoid(b)     a: decay = -exp(A) * softplus(a + bias)
```
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.attention.call import PagedAttention, UnsupportedModelError
from engine.model.families import RMS
from engine.model.loader import Loader, Source
from engine.model.mixers.mixer import Mixer, load_taps, make_softplus
from engine.model.rotary import StepAngles
from engine.model.spec import DecoderSpec


class DeltaNet(Mixer):
    """Its state: the newest inputs of the convolution, and a matrix for each value head."""

    def __init__(self, loader: Loader, spec: DecoderSpec, index: int, name: str) -> None:
        config: Any = spec.config
        if config.hidden_act != "silu":
            raise UnsupportedModelError(f"its delta nets use {config.hidden_act}")
        state = spec.layers[index].state
        self._index = spec.state_index(index)
        heads, self._key_dim, self._value_dim = state[1].dims
        inner, value_width = state[0].dims[1], heads * self._value_dim
        key_width = (inner - value_width) // 2
        self._parts = (inner, value_width, heads, heads)
        self._qkv = (key_width, key_width, value_width)
        sources = _sources(spec, name, key_width // self._key_dim, self._parts)
        self.inner = loader.linear(sources, spec.hidden_size)
        self.out = loader.linear([Source(f"{name}.out_proj", spec.hidden_size)], value_width)
        self._taps, self._bias = load_taps(loader, f"{name}.conv1d", state)
        self._scale = -loader.fp32(f"{name}.A_log", heads).exp()
        self._offset = loader.fp32(f"{name}.dt_bias", heads)
        self._norm = loader.norm(f"{name}.norm", (self._value_dim,), RMS, spec.norm_eps)
        self._sigmoid, self._gated = loader.elementwise.sigmoid, loader.elementwise.gated_activation
        self._softplus = make_softplus(loader.device)

    def __call__(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        qkv, gate, rate, decay = self.inner(hidden).split_with_sizes(self._parts, -1)
        mixed = paged.states.convolve(self._index, qkv, self._taps, self._bias, silu=True)
        query, key, value = mixed.split_with_sizes(self._qkv, -1)
        value = paged.states.advance(
            self._index,
            query.unflatten(-1, (-1, self._key_dim)),
            key.unflatten(-1, (-1, self._key_dim)),
            value.unflatten(-1, (-1, self._value_dim)),
            self._scale * self._softplus(decay.float() + self._offset),
            self._sigmoid(rate).float(),
            is_delta=True,
        )
        gate = gate.unflatten(-1, (-1, self._value_dim))
        if rows is not None:
            value, gate = value.index_select(0, rows), gate.index_select(0, rows)
        both = torch.cat([gate, self._norm(value)], -1).flatten(0, 1)
        return self.out(self._gated(both, "silu").view(len(value), self._qkv[2]))


def _sources(
    spec: DecoderSpec, name: str, num_key_heads: int, parts: tuple[int, ...]
) -> list[Source]:
    """Return the weights of q, k, v | z | b | a, which Qwen3-Next stores by key head."""
    if spec.model_type != "qwen3_next":
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return [Source(f"{name}.{part}", size) for part, size in zip(names, parts, strict=True)]
    inner, value_width, heads, _ = parts
    width, share = inner + value_width, heads // num_key_heads
    key_dim, own = (inner - value_width) // (2 * num_key_heads), value_width // num_key_heads
    wide = torch.arange(width).view(num_key_heads, -1).split([key_dim, key_dim, own, own], 1)
    narrow = torch.arange(2 * heads).view(num_key_heads, -1).split([share, share], 1)
    return [
        Source(f"{name}.in_proj_qkvz", width, torch.cat([part.flatten() for part in wide])),
        Source(f"{name}.in_proj_ba", 2 * heads, torch.cat([part.flatten() for part in narrow])),
    ]
