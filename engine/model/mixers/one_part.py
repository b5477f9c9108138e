"""Layers with one part each, as Nemotron-H has them: a state, attention, an MLP or experts."""

from __future__ import annotations

from torch import Tensor

from engine.attention.call import PagedAttention
from engine.model.decoder import Decoder
from engine.model.layer import (
    MLP,
    Layer,
    layer_name,
    load_layer_norms,
    load_mlp,
    make_attention,
    prepare_part,
)
from engine.model.loader import Loader
from engine.model.norms import add_and_norm
from engine.model.rotary import Rotary, StepAngles
from engine.model.spec import DecoderSpec
from kernels.cpu.calls import NoKernelError
from kernels.cpu.step_calls import StepCalls


class OnePartLayer(Layer):
    """`x += part(norm(x))`."""

    def __init__(self, loader: Loader, spec: DecoderSpec, index: int, rotary: Rotary) -> None:
        name, layer = layer_name(spec, index), spec.layers[index]
        self.norms = load_layer_norms(loader, spec, name)
        self._mixes_tokens = bool(layer.state) or layer.has_attention
        if self._mixes_tokens:
            self.attention = make_attention(loader, spec, index, name, rotary)
        else:
            self.mlp = load_mlp(loader, spec, index, name)

    def __call__(
        self,
        hidden: Tensor,
        output: Tensor | None,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        hidden, normed = add_and_norm(hidden, output, self.norms[0])
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        if self._mixes_tokens:
            return hidden, self.attention(normed, angles, paged, rows)
        return hidden, self.mlp(normed if rows is None else normed.index_select(0, rows))

    def prepare(self, calls: StepCalls) -> None:
        if self._mixes_tokens:
            prepare_part(calls, self.norms[0], self.attention, None)
        elif isinstance(self.mlp, MLP):
            prepare_part(calls, self.norms[0], self.mlp, None)
        else:
            raise NoKernelError("it has experts")


class OnePartDecoder(Decoder):
    def make_layer(self, loader: Loader, index: int) -> Layer:
        return OnePartLayer(loader, self.spec, index, self.rotary)
