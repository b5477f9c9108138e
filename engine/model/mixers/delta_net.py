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
from engine.model.heads import elements_of
from engine.model.loader import Loader, Source
from engine.model.mixers.mixer import (
    Mixer,
    load_taps,
    prepare_convolution,
    prepare_gates,
    prepare_recurrence,
    rows_of,
)
from engine.model.rotary import StepAngles
from engine.model.spec import DecoderSpec
from engine.shard import Shard
from kernels.cpu.elementwise import gated
from kernels.cpu.step_calls import StepCalls


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
        part = _Part(config, loader.shard)
        self.inner = loader.linear(part.sources(name), spec.hidden_size)
        self.out = loader.linear(
            [Source(f"{name}.out_proj", spec.hidden_size)],
            part.value_width,
            columns=elements_of(part.values, self._value_dim),
        )
        taps = load_taps(loader, f"{name}.conv1d", state, sum(part.widths), part.channels)
        self._taps, self._bias = taps
        self._scale = -loader.fp32(f"{name}.A_log", part.num_values, part.values).exp()
        self._offset = loader.fp32(f"{name}.dt_bias", part.num_values, part.values)
        self._norm = loader.norm(f"{name}.norm", (self._value_dim,), RMS, spec.norm_eps)
        self._gated = loader.elementwise.gated_activation

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
        gates = paged.states.gates(decay, rate, self._scale, self._offset)
        value = paged.states.advance(
            self._index,
            query.unflatten(-1, (-1, self._key_dim)),
            key.unflatten(-1, (-1, self._key_dim)),
            value.unflatten(-1, (-1, self._value_dim)),
            *gates,
            is_delta=True,
        )
        gate = gate.unflatten(-1, (-1, self._value_dim))
        if rows is not None:
            value, gate = value.index_select(0, rows), gate.index_select(0, rows)
        both = torch.cat([gate, self._norm(value)], -1).flatten(0, 1)
        return self.out(self._gated(both, "silu").view(len(value), self._qkv[2]))

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        heads = (-1, self._value_dim)
        merged = calls.buffer("inner", sum(self._parts))
        self.inner.prepare(calls, rows, merged)
        qkv, gate, rate, decay = merged.split_with_sizes(self._parts, -1)
        gates = prepare_gates(calls, decay, rate, self._scale, self._offset)
        prepare_convolution(calls, self._index, qkv, self._taps, self._bias, qkv, silu=True)
        query, key, value = qkv.split_with_sizes(self._qkv, -1)
        query, key = (part.unflatten(-1, (-1, self._key_dim)) for part in (query, key))
        mixed = calls.buffer("attended", self._qkv[2])
        by_head = mixed.unflatten(-1, heads)
        tokens = (query, key, value.unflatten(-1, heads), *gates)
        prepare_recurrence(calls, self._index, *tokens, out=by_head, is_delta=True)
        calls.add_reads(gate)
        self._norm.prepare(calls, by_head, by_head)
        calls.add(gated(gate, mixed, "silu", out=mixed))
        self.out.prepare(calls, mixed, out, residual)


class _Part:
    """This process's heads: some key heads, each with its value heads."""

    def __init__(self, config: Any, shard: Shard) -> None:
        self._config = config
        self._num_keys, self.num_values = config.linear_num_key_heads, config.linear_num_value_heads
        self._key_dim = config.linear_key_head_dim
        self._share = self.num_values // self._num_keys
        self._keys = shard.part(self._num_keys)
        self.values = range(self._keys.start * self._share, self._keys.stop * self._share)
        key_width = self._num_keys * self._key_dim
        self.value_width = self.num_values * config.linear_value_head_dim
        self.widths = (key_width, key_width, self.value_width)
        """Of q, k and v in the checkpoint."""
        keys = elements_of(self._keys, self._key_dim)
        self._value_elements = elements_of(self.values, config.linear_value_head_dim)
        self.channels = rows_of(self.widths, (keys, keys, self._value_elements))
        """Of q, k and v, [C] int64; None: all."""

    def sources(self, name: str) -> list[Source]:
        """Return the weights of q, k, v | z | b | a, which Qwen3-Next stores by key head."""
        if self._config.model_type == "qwen3_next":
            return self._sources_by_head(name)
        gates = rows_of((self.value_width,), (self._value_elements,))
        heads = rows_of((self.num_values,), (self.values,))
        return [
            Source(f"{name}.in_proj_qkv", sum(self.widths), self.channels),
            Source(f"{name}.in_proj_z", self.value_width, gates),
            Source(f"{name}.in_proj_b", self.num_values, heads),
            Source(f"{name}.in_proj_a", self.num_values, heads),
        ]

    def _sources_by_head(self, name: str) -> list[Source]:
        width, share = sum(self.widths) + self.value_width, self._share
        key_dim, own = self._key_dim, share * self._config.linear_value_head_dim
        held = slice(self._keys.start, self._keys.stop)
        wide = (
            torch.arange(width)
            .view(self._num_keys, -1)[held]
            .split([key_dim, key_dim, own, own], 1)
        )
        narrow = torch.arange(2 * self.num_values).view(self._num_keys, -1)[held].split(share, 1)
        return [
            Source(f"{name}.in_proj_qkvz", width, torch.cat([part.flatten() for part in wide])),
            Source(
                f"{name}.in_proj_ba",
                2 * self.num_values,
                torch.cat([part.flatten() for part in narrow]),
            ),
        ]
