"""Mamba (arXiv 2312.00752): see `kernels.state.reference.scan`.

```
x | z        x: convolution, silu ──▶ recurrence, + D x ──▶ * silu(z) ──▶ out
dt | B | C   of the convolved x      dt: rate = softplus(projection of dt)
```

Falcon Mamba norms dt, B and C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.states.layout import mamba_sizes
from engine.attention.call import PagedAttention, UnsupportedModelError
from engine.model.families import RMS
from engine.model.loader import Loader, Source
from engine.model.mixers.mixer import Mixer, load_taps, rows_of
from engine.model.norms import RMSNorm
from engine.model.rotary import StepAngles
from engine.model.spec import DecoderSpec


class Mamba(Mixer):
    """Its state: the newest inputs of the convolution, and a column of numbers for each channel."""

    def __init__(self, loader: Loader, spec: DecoderSpec, index: int, name: str) -> None:
        config: Any = spec.config
        if config.hidden_act != "silu":
            raise UnsupportedModelError(f"its Mamba layers use {config.hidden_act}")
        width, size, rank, _ = mamba_sizes(config.to_dict())
        self._index, self._sizes = spec.state_index(index), (rank, size, size)
        part = loader.shard.part(width)
        both, own = rows_of((width,) * 2, (part,) * 2), rows_of((width,), (part,))
        self.inner = loader.linear([Source(f"{name}.in_proj", 2 * width, both)], spec.hidden_size)
        self.selection = loader.linear(
            [Source(f"{name}.x_proj", sum(self._sizes))], width, columns=part
        )
        self.times = loader.linear([Source(f"{name}.dt_proj", width, own)], rank)
        self.out = loader.linear(
            [Source(f"{name}.out_proj", spec.hidden_size)], width, columns=part
        )
        state = spec.layers[index].state
        self._taps, self._bias = load_taps(loader, f"{name}.conv1d", state, width, own)
        numbers = loader.fp32(f"{name}.A_log", width * size).view(width, size)
        self._scale = -numbers[part.start : part.stop].exp().T.contiguous()
        self._skip = loader.fp32(f"{name}.D", width, part)
        self._norms: Sequence[RMSNorm] = ()
        if config.model_type == "falcon_mamba":
            ones = (torch.ones(n, device=loader.device, dtype=loader.dtype) for n in self._sizes)
            eps, elementwise = config.mixer_rms_eps, loader.elementwise
            self._norms = [RMSNorm(weight, eps, RMS, elementwise) for weight in ones]
        self._gated = loader.elementwise.gated_activation
        self._zeros = torch.zeros(len(part), device=loader.device)

    def __call__(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        value, gate = self.inner(hidden).chunk(2, -1)
        value = self._scanned(value, paged)
        if rows is not None:
            value, gate = value.index_select(0, rows), gate.index_select(0, rows)
        return self.out(self._gated(torch.cat([gate, value], -1), "silu"))

    def _scanned(self, value: Tensor, paged: PagedAttention) -> Tensor:
        value = paged.states.convolve(self._index, value, self._taps, self._bias, silu=True)
        parts = self.selection(value).split_with_sizes(self._sizes, -1)
        if self._norms:
            parts = [norm(part.contiguous()) for norm, part in zip(self._norms, parts, strict=True)]
        time, key, query = parts
        time = self.times(time.contiguous())
        rate = paged.states.gates(time, None, self._zeros, self._zeros)[1]
        return paged.states.scan(self._index, query, key, value, rate, self._scale, self._skip)
