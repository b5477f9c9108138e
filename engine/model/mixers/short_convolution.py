"""The short convolution of LFM2: `out(after * convolution(before * x))`, with two gates."""

from __future__ import annotations

from torch import Tensor

from engine.attention.call import PagedAttention
from engine.model.loader import Loader, Source
from engine.model.mixers.mixer import Mixer, load_taps, prepare_convolution, rows_of
from engine.model.rotary import StepAngles
from engine.model.spec import DecoderSpec
from kernels.cpu.step_calls import StepCalls


class ShortConvolution(Mixer):
    """Its state: the newest inputs of the convolution."""

    def __init__(self, loader: Loader, spec: DecoderSpec, index: int, name: str) -> None:
        width = spec.hidden_size
        self._index = spec.state_index(index)
        part = loader.shard.part(width)
        order = rows_of((width,) * 3, (part,) * 3)
        self.inner = loader.linear([Source(f"{name}.in_proj", 3 * width, order)], width)
        self.out = loader.linear([Source(f"{name}.out_proj", width)], width, columns=part)
        state, order = spec.layers[index].state, rows_of((width,), (part,))
        self._taps, self._bias = load_taps(loader, f"{name}.conv", state, width, order)

    def __call__(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        before, after, inner = self.inner(hidden).chunk(3, -1)
        mixed = paged.states.convolve(
            self._index, inner, self._taps, self._bias, before=before, after=after
        )
        return self.out(mixed if rows is None else mixed.index_select(0, rows))

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        merged = calls.buffer("inner", 3 * self._taps.shape[1])
        self.inner.prepare(calls, rows, merged)
        before, after, inner = merged.chunk(3, -1)
        mixed = calls.buffer("attended", inner.shape[1])
        prepare_convolution(
            calls, self._index, inner, self._taps, self._bias, mixed, before=before, after=after
        )
        self.out.prepare(calls, mixed, out, residual)
