"""Rotary position embedding (Su et al., 2021): the cosines and sines of each token.

They depend only on the token's position, never on the rest of the batch. In transformers,
some variants (longrope, dynamic) switch frequencies with the longest sequence of a batch. Here the
maximum length of a sequence decides once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.model.spec import DecoderSpec, is_long

OWN_KINDS = {"default", "dynamic"}
"""The values of `rope_type` whose frequencies are computed here, not by transformers."""


class Angles(NamedTuple):
    """Cosines and sines of T tokens. Elements i and i + half of a head rotate together."""

    cos: Tensor
    """[T, half]."""
    sin: Tensor
    """[T, half]."""


class StepAngles(NamedTuple):
    """What all layers read of T tokens: what their positions mean for queries and keys."""

    by_rope: Mapping[str, Angles]
    """By `LayerSpec.rope`."""
    query_scale: Tensor | None
    """[T, 1, 1], a factor on the queries of a token; None: 1."""
    layer_inputs: Tensor | None = None
    """[T, layers, width], what each layer knows of a token besides its hidden state; None:
    nothing."""


class Rope:
    """The rotation of the layers that have the same `LayerSpec.rope`."""

    def __init__(self, frequencies: Tensor, factor: float, dtype: torch.dtype) -> None:
        """frequencies: [half] fp32. Cosines and sines are multiplied by the factor."""
        self.frequencies, self._factor, self._dtype = frequencies, factor, dtype

    def __call__(self, positions: Tensor) -> Angles:
        """positions: [T] int64."""
        return self._of(torch.outer(positions.float(), self.frequencies))

    def _of(self, angles: Tensor) -> Angles:
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return Angles(cos.to(self._dtype), sin.to(self._dtype))


class AxialRope(Rope):
    """Rotates by the time, row and column of each token (Qwen2-VL's M-RoPE)."""

    def __init__(
        self, frequencies: Tensor, factor: float, dtype: torch.dtype, axes: Tensor
    ) -> None:
        """axes: [half] int64, the axis of each frequency."""
        super().__init__(frequencies, factor, dtype)
        self._axes = axes

    def __call__(self, positions: Tensor) -> Angles:
        """positions: [3, T] int64; or [T] if the three are the same."""
        if positions.dim() == 1:
            return super().__call__(positions)
        # The kernels need contiguous rows.
        return self._of(positions[self._axes].T.float().contiguous() * self.frequencies)


class QueryScale:
    """The factors on queries that depend on their positions (Ministral 3, Mistral 4)."""

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
        assert spec.query_scaling is not None
        beta, self._original = spec.query_scaling
        # A table, because the bits of torch's logarithm depend on the number of tokens.
        steps = torch.arange(spec.max_length // self._original + 1)
        self._scales = (1 + beta * torch.log1p(steps)).to(device, dtype)

    def __call__(self, positions: Tensor) -> Tensor:
        """Return [T, 1, 1] for positions [T]."""
        return self._scales[positions // self._original][:, None, None]


class Rotary:
    """Computes the angles of all layers, once for each distinct `LayerSpec.rope`."""

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
        wanted = sorted({layer.rope for layer in spec.layers if layer.rope is not None})
        self._ropes = {name: _rope(spec, name, device, dtype) for name in wanted}
        self._query_scale = QueryScale(spec, device, dtype) if spec.query_scaling else None

    def __call__(self, positions: Tensor) -> StepAngles:
        """Return the angles and the factors on queries.

        positions: [T] int64; or [3, T], the time, row and column of each token, where the model
        rotates by them (Qwen2-VL's M-RoPE).
        """
        by_rope = {name: rope(positions) for name, rope in self._ropes.items()}
        return StepAngles(by_rope, self._query_scale and self._query_scale(positions))

    def width(self, name: str) -> int:
        """Return how many elements of a head rotate."""
        return 2 * len(self._ropes[name].frequencies)


def _rope(spec: DecoderSpec, name: str, device: torch.device, dtype: torch.dtype) -> Rope:
    found, factor = _frequencies(spec, name)
    frequencies, axes = found.to(device, torch.float32), _axes(spec.ropes[name], device)
    if axes is None:
        return Rope(frequencies, float(factor), dtype)
    return AxialRope(frequencies, float(factor), dtype, axes)


def _axes(parameters: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """Return the axis of each frequency, [half] int64: 0, 1 or 2; None without `mrope_section`."""
    sections = parameters.get("mrope_section")
    if sections is None:
        return None
    if not parameters.get("mrope_interleaved"):
        axes = torch.arange(len(sections)) % 3
        return axes.repeat_interleave(torch.tensor(sections)).to(device)
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes.to(device)


def _frequencies(spec: DecoderSpec, name: str) -> tuple[Tensor, float]:
    """Return the frequencies [half] and the factor that cosines and sines are multiplied by."""
    parameters = spec.ropes[name]
    kind = parameters["rope_type"]
    config: Any = spec.config
    # Dynamic NTK only applies beyond the training length, which `max_model_len` never exceeds.
    if kind in OWN_KINDS:
        dim = next(layer.head_dim for layer in spec.layers if layer.rope == name)
        if spec.latent is None:
            dim = int(dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        base = parameters["rope_theta"]
        if kind == "dynamic" and parameters.get("alpha"):  # HunYuan's variant, at every length
            base *= parameters["alpha"] ** (dim / (dim - 2))
        return 1.0 / base**exponents, 1.0
    # Imported only here, since a later start of most models needs nothing else of transformers.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    keywords: dict[str, Any] = {"layer_type": name} if name else {}
    scale: float | None = None
    if kind == "longrope":
        original = parameters["original_max_position_embeddings"]
        is_beyond = is_long(parameters, spec.max_length)
        keywords["seq_len"] = original + 1 if is_beyond else original
        scale = parameters.get("long_mscale" if is_beyond else "short_mscale")  # Phi-3.5-MoE's
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **keywords)
    return frequencies, factor if scale is None else scale
