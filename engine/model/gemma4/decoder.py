"""The decoder of Gemma 4."""

from __future__ import annotations

from torch import Tensor

from engine.model.decoder import Decoder
from engine.model.gemma4.attention import folded_angles
from engine.model.gemma4.inputs import LayerInputs, input_width
from engine.model.gemma4.layer import Gemma4Layer
from engine.model.layer import Layer
from engine.model.loader import Loader
from engine.model.rotary import StepAngles
from engine.model.spec import DecoderSpec


class Gemma4Decoder(Decoder):
    """A decoder whose layers may have inputs of their own, besides hidden states."""

    def __init__(
        self, loader: Loader, spec: DecoderSpec, num_layers: int, *, show_progress: bool = False
    ) -> None:
        super().__init__(loader, spec, num_layers, show_progress=show_progress)
        self._inputs: LayerInputs | None = None
        if input_width(spec.config):
            self._inputs = LayerInputs(loader, spec, num_layers)
            self.num_bytes, self.num_weights = loader.num_bytes, loader.num_weights

    def make_layer(self, loader: Loader, index: int) -> Layer:
        return Gemma4Layer(loader, self.spec, index, self.rotary)

    def angles(self, token_ids: Tensor, hidden: Tensor, positions: Tensor) -> StepAngles:
        angles = folded_angles(self.spec, super().angles(token_ids, hidden, positions))
        if self._inputs is None:
            return angles
        return angles._replace(layer_inputs=self._inputs(token_ids, hidden))
