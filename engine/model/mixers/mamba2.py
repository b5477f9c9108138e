"""Mamba-2 (arXiv 2405.21060): see `kernels.state.reference`.

```
x | B | C   convolution, silu ──▶ recurrence, + D x ──▶ * silu(z) ──▶ norm of each group ──▶ out
z | dt      dt: rate = softplus(dt + bias), decay = -exp(A) * rate
```

Falcon-H1 norms before it multiplies by silu(z), or has no norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.states.layout import Mamba2Sizes, mamba2_sizes
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
from engine.model.norms import Norm, RMSNorm
from engine.model.rotary import StepAngles
from engine.model.spec import DecoderSpec
from engine.shard import Shard
from kernels.cpu.calls import NoKernelError
from kernels.cpu.elementwise import gated
from kernels.cpu.step_calls import StepCalls


class Mamba2(Mixer):
    """Its state: the newest inputs of the convolution, and a matrix for each head.

    B and C belong to groups of heads, and the norm is of a group's heads together.
    """

    def __init__(self, loader: Loader, spec: DecoderSpec, index: int, name: str) -> None:
        config: Any = spec.config
        activation = getattr(config, "mamba_hidden_act", None) or config.hidden_act
        if activation != "silu":
            raise UnsupportedModelError(f"its Mamba layers use {activation}")
        state = spec.layers[index].state
        self._index = spec.state_index(index)
        heads, self._size, self._dim = state[1].dims
        inner, convolved = heads * self._dim, state[0].dims[1]
        outer = (convolved - inner) // 2
        self._parts, self._xbc = (inner, convolved, heads), (inner, outer, outer)
        part = _Part(mamba2_sizes(config.to_dict()), loader.shard)
        in_proj = Source(f"{name}.in_proj", sum(part.projected), part.rows)
        self.inner = loader.linear([in_proj], spec.hidden_size)
        self.out = loader.linear(
            [Source(f"{name}.out_proj", spec.hidden_size)], part.inner, columns=part.columns
        )
        taps = load_taps(loader, f"{name}.conv1d", state, sum(part.convolved), part.channels)
        self._taps, self._bias = taps
        self._scale = -loader.fp32(f"{name}.A_log", part.heads, part.own_heads).exp()
        self._offset = loader.fp32(f"{name}.dt_bias", part.heads, part.own_heads)
        self._skip = loader.fp32(f"{name}.D", part.heads, part.own_heads)
        self._least, self._most = _time_limits(config)
        self._clamps = clamps_prompts(config)
        self._group = inner // len(part.own_groups)
        self._norms: Sequence[Norm] = ()
        if f"{name}.norm.weight" in loader.checkpoint:
            self._norms = part.norms(loader, f"{name}.norm", spec.norm_eps)
        self._norms_first = getattr(config, "mamba_norm_before_gate", False)
        self._gated = loader.elementwise.gated_activation

    def __call__(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        gate, xbc, time = self.inner(hidden).split_with_sizes(self._parts, -1)
        mixed = paged.states.convolve(self._index, xbc, self._taps, self._bias, silu=True)
        value, key, query = mixed.split_with_sizes(self._xbc, -1)
        decay, rate = paged.states.gates(time, None, self._scale, self._offset)
        if self._clamps:
            # transformers clamps the tokens of a prompt, and not those of an answer.
            clamped = rate.clamp(self._least, self._most)
            rate = torch.where(paged.states.in_prompt[:, None], clamped, rate)
            decay = self._scale * rate
        value = paged.states.advance(
            self._index,
            query.unflatten(-1, (-1, self._size)),
            key.unflatten(-1, (-1, self._size)),
            value.unflatten(-1, (-1, self._dim)),
            decay,
            rate,
            is_delta=False,
            skip=self._skip,
        ).flatten(1)
        if rows is not None:
            value, gate = value.index_select(0, rows), gate.index_select(0, rows)
        if self._norms_first:
            return self.out(self._gated(torch.cat([gate, self._normed(value)], -1), "silu"))
        return self.out(self._normed(self._gated(torch.cat([gate, value], -1), "silu")))

    def _normed(self, rows: Tensor) -> Tensor:
        if not self._norms:
            return rows
        if len(self._norms) == 1:
            return self._norms[0](rows)
        parts = rows.split(self._group, -1)
        normed = [norm(part.contiguous()) for norm, part in zip(self._norms, parts, strict=True)]
        return torch.cat(normed, -1)

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        if self._clamps:
            raise NoKernelError("it clamps the time steps of prompts")
        merged = calls.buffer("inner", sum(self._parts))
        self.inner.prepare(calls, rows, merged)
        gate, xbc, time = merged.split_with_sizes(self._parts, -1)
        gates = prepare_gates(calls, time, None, self._scale, self._offset)
        prepare_convolution(calls, self._index, xbc, self._taps, self._bias, xbc, silu=True)
        value, key, query = xbc.split_with_sizes(self._xbc, -1)
        query, key = (part.unflatten(-1, (-1, self._size)) for part in (query, key))
        value, mixed = value.unflatten(-1, (-1, self._dim)), calls.buffer("attended", self._xbc[0])
        prepare_recurrence(
            calls,
            self._index,
            *(query, key, value, *gates),
            out=mixed.unflatten(-1, (-1, self._dim)),
            is_delta=False,
            skip=self._skip,
        )
        calls.add_reads(gate)
        if self._norms_first:
            self._prepare_norms(calls, mixed)
        calls.add(gated(gate, mixed, "silu", out=mixed))
        if not self._norms_first:
            self._prepare_norms(calls, mixed)
        self.out.prepare(calls, mixed, out, residual)

    def _prepare_norms(self, calls: StepCalls, rows: Tensor) -> None:
        for norm, part in zip(self._norms, rows.split(self._group, -1), strict=False):
            norm.prepare(calls, part, part)


def clamps_prompts(config: Any) -> bool:
    """Return whether tokens of a prompt are computed otherwise than those of an answer."""
    least, most = _time_limits(config)
    return least > 0 or most < float("inf")


def _time_limits(config: Any) -> tuple[float, float]:
    if config.model_type == "nemotron_h":
        return config.time_step_min, float("inf")
    return getattr(config, "time_step_limit", None) or (0.0, float("inf"))


class _Part:
    """This process's heads, with the groups whose B and C they read."""

    def __init__(self, sizes: Mamba2Sizes, shard: Shard) -> None:
        self.heads, self._groups = sizes.heads, sizes.groups
        self.inner, outer = sizes.heads * sizes.dim, sizes.groups * sizes.size
        self.own_heads = shard.part(sizes.heads)
        self.columns = elements_of(self.own_heads, sizes.dim)
        first = shard.rank * sizes.groups // shard.size
        self.own_groups = shard.part(sizes.groups) or range(first, first + 1)
        self._is_of_one_group = sizes.groups < shard.size
        groups = elements_of(self.own_groups, sizes.size)
        self.projected = (self.inner, self.inner, outer, outer, sizes.heads)
        """The widths of z, x, B, C and dt in the checkpoint."""
        parts = (self.columns, self.columns, groups, groups, self.own_heads)
        self.rows = rows_of(self.projected, parts)
        self.convolved = self.projected[1:4]
        self.channels = rows_of(self.convolved, parts[1:4])
        """Of x, B and C; None: all."""

    def norms(self, loader: Loader, name: str, eps: float) -> list[Norm]:
        """Load the norms of this process's groups, or of its part of a group."""
        if self._is_of_one_group:
            own = (name, self.inner, self.columns, 1, RMS, eps, self._groups)
            return [loader.split_norm(*own)]
        weight = loader.tensor(f"{name}.weight", self.inner)
        weight = weight[self.columns.start : self.columns.stop]
        weights = weight.unflatten(0, (len(self.own_groups), -1))
        return [RMSNorm(part.contiguous(), eps, RMS, loader.elementwise) for part in weights]
