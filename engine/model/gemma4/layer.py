"""A layer of Gemma 4."""

from __future__ import annotations

from torch import Tensor

from engine.attention.call import PagedAttention
from engine.model.gemma4.attention import Gemma4Attention
from engine.model.gemma4.experts import ExpertsBesideMLP
from engine.model.gemma4.inputs import LayerInput, input_width
from engine.model.layer import MLP, Layer, layer_name, load_layer_norms
from engine.model.loader import Loader
from engine.model.rotary import Rotary, StepAngles
from engine.model.spec import DecoderSpec
from kernels.cpu.calls import NoKernelError
from kernels.cpu.step_calls import StepCalls


class Gemma4Layer(Layer):
    """A layer that also reads an input of its own, if it has one, and scales its output."""

    def __init__(self, loader: Loader, spec: DecoderSpec, index: int, rotary: Rotary) -> None:
        name, family, layer = layer_name(spec, index), spec.family, spec.layers[index]
        self.norms = load_layer_norms(loader, spec, name)
        self.attention = Gemma4Attention(loader, spec, index, f"{name}.{family.attention}", rotary)
        mlp = MLP(loader, spec, f"{name}.{family.mlp}", layer.mlp_width)
        self.mlp = mlp
        if layer.has_experts:
            before_mlp, self.norms[2] = self.norms[2], None
            assert before_mlp is not None
            self.mlp = ExpertsBesideMLP(loader, spec, index, name, mlp, before_mlp)
        self.is_parallel, self.residual_scale = False, 1.0
        self._input: LayerInput | None = None
        if input_width(spec.config):
            self._input = LayerInput(loader, spec, name)
        self._index = index
        self._scale = loader.tensor(f"{name}.layer_scalar", 1)

    def __call__(
        self,
        hidden: Tensor,
        output: Tensor | None,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        hidden, output = super().__call__(hidden, output, angles, paged, rows)
        if output is not None:
            hidden = hidden + output
        if self._input is not None:
            assert angles.layer_inputs is not None
            layer_input = angles.layer_inputs[:, self._index]
            if rows is not None:
                layer_input = layer_input.index_select(0, rows)
            hidden = self._input(hidden, layer_input)
        return hidden * self._scale, None

    def prepare(self, calls: StepCalls) -> None:
        raise NoKernelError("its layers are Gemma 4's")
