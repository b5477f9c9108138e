"""Chooses the mixer of a family."""

from __future__ import annotations

from engine.model.loader import Loader
from engine.model.mixers.delta_net import DeltaNet
from engine.model.mixers.mixer import Mixer
from engine.model.mixers.short_convolution import ShortConvolution
from engine.model.spec import DecoderSpec


def make_mixer(loader: Loader, spec: DecoderSpec, index: int, name: str) -> Mixer:
    """Load the mixer of layer `index`, whose name in the checkpoint is `name`."""
    kind = DeltaNet if spec.family.state == "linear_attn" else ShortConvolution
    return kind(loader, spec, index, name)
