"""Chooses the mixer of a family."""

from __future__ import annotations

from collections.abc import Mapping

from engine.model.loader import Loader
from engine.model.mixers.delta_net import DeltaNet
from engine.model.mixers.mamba2 import Mamba2
from engine.model.mixers.mixer import Mixer
from engine.model.mixers.short_convolution import ShortConvolution
from engine.model.spec import DecoderSpec

MIXERS: Mapping[str, type[DeltaNet | Mamba2 | ShortConvolution]] = {
    "conv": ShortConvolution,
    "linear_attn": DeltaNet,
    "mamba": Mamba2,
}
"""By `Family.state`."""


def make_mixer(loader: Loader, spec: DecoderSpec, index: int, name: str) -> Mixer:
    """Load the mixer of layer `index`, whose name in the checkpoint is `name`."""
    kind = MIXERS[spec.family.state]
    return kind(loader, spec, index, name)
