"""Chooses the mixer of a family, and puts it beside attention where a layer has both."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from engine.attention.call import PagedAttention
from engine.model.loader import Loader
from engine.model.mixers.delta_net import DeltaNet
from engine.model.mixers.mamba import Mamba
from engine.model.mixers.mamba2 import Mamba2
from engine.model.mixers.mixer import Mixer
from engine.model.mixers.short_convolution import ShortConvolution
from engine.model.rotary import StepAngles
from engine.model.spec import DecoderSpec

MIXERS: Mapping[str, type[DeltaNet | Mamba2 | ShortConvolution]] = {
    "conv": ShortConvolution,
    "linear_attn": DeltaNet,
    "mamba": Mamba2,
    "mixer": Mamba2,
}
"""By `Family.state`."""


def make_mixer(loader: Loader, spec: DecoderSpec, index: int, name: str) -> Mixer:
    """Load the mixer of layer `index`, whose name in the checkpoint is `name`."""
    is_first_version = spec.model_type in ("mamba", "falcon_mamba")
    kind = Mamba if is_first_version else MIXERS[spec.family.state]
    return kind(loader, spec, index, name)


class BesideAttention(Mixer):
    """A mixer and attention, which read the same input and whose outputs are added."""

    def __init__(self, mixer: Mixer, attention: Callable[..., Tensor]) -> None:
        self._mixer, self._attention = mixer, attention

    def __call__(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        mixed = self._mixer(hidden, angles, paged, rows)
        return mixed + self._attention(hidden, angles, paged, rows)
