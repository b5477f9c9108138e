"""Rotary position embedding (Su et al., 2021): the angles of each token.

They depend on the token's position alone, never on what else is in the batch: transformers' forms
that switch their frequencies by the longest sequence at hand (longrope, dynamic) are settled once,
by the most tokens that a sequence may have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model.spec import DecoderSpec, is_long


class Angles(NamedTuple):
    """Of T tokens; element i turns with element i + half of a head's first `2 * half`."""

    cos: Tensor
    """[T, half]."""
    sin: Tensor


class Rotary:
    """The angles of all layers, by `LayerSpec.rope`."""

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        wanted = {layer.rope for layer in spec.layers if layer.rope is not None}
        self._frequencies = {
            name: (frequencies.to(device, torch.float32), float(factor))
            for name in sorted(wanted)
            for frequencies, factor in [_frequencies(spec, name)]
        }

    def __call__(self, positions: Tensor) -> Mapping[str, Angles]:
        """positions: [T] int64."""
        return {name: self._angles(positions, *each) for name, each in self._frequencies.items()}

    def _angles(self, positions: Tensor, frequencies: Tensor, factor: float) -> Angles:
        turns = torch.outer(positions.float(), frequencies)
        cos, sin = turns.cos(), turns.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return Angles(cos.to(self._dtype), sin.to(self._dtype))

    def width(self, name: str) -> int:
        """How many of a head's elements turn."""
        return 2 * len(self._frequencies[name][0])


def _frequencies(spec: DecoderSpec, name: str) -> tuple[Tensor, float]:
    """[half], and what cosines and sines are multiplied by."""
    parameters = spec.ropes[name]
    kind = parameters["rope_type"]
    config: Any = spec.config
    # Up to the length of training, to which `max_model_len` is bound, dynamic NTK changes nothing.
    if kind in ("default", "dynamic"):
        dim = int(spec.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        base = parameters["rope_theta"]
        if kind == "dynamic" and parameters.get("alpha"):  # HunYuan's: at every length
            base *= parameters["alpha"] ** (dim / (dim - 2))
        return 1.0 / base**exponents, 1.0
    keywords: dict[str, Any] = {"layer_type": name} if name else {}
    if kind == "longrope":
        original = parameters["original_max_position_embeddings"]
        keywords["seq_len"] = original + 1 if is_long(parameters, spec.max_length) else original
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **keywords)
