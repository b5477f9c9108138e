"""Runs all layers of a decoder in one call of the CPU library (`kernels.cpu.prepared_layers`)."""

from __future__ import annotations

from torch import Tensor

from engine.attention.backends import CpuBackend
from engine.attention.paged_step import PagedStep
from engine.model.activations import FUSED
from engine.model.decoder import MLP, AnglesByRope, Attention, Decoder, Layer
from engine.model.linear import Linear, Panels
from engine.model.norms import Norm, RMSNorm
from engine.model.quantization.integers import Integers
from kernels.cpu.prepared import NoKernelError, PreparedLinear, PreparedMLP, PreparedNorm
from kernels.cpu.prepared_layers import (
    AttentionInputs,
    Heads,
    LayerNorms,
    PreparedAttention,
    PreparedLayer,
    PreparedLayers,
)


class NativeLayers:
    """Computes the same as `Decoder.layers`, without adapters."""

    def __init__(self, decoder: Decoder) -> None:
        """Raises NoKernelError, with the reason, if the library has no kernel for some layer."""
        self._ropes = [layer.attention.layer.rope for layer in decoder.layers]
        self._layers = PreparedLayers([_layer(layer) for layer in decoder.layers])

    def __call__(
        self, hidden: Tensor, angles: AnglesByRope, paged: object, rows: Tensor | None
    ) -> Tensor | None:
        """Return hidden states [T, hidden]. With `rows`, R < T, return only theirs, [R, hidden].

        Returns None unless `paged` is a step of the CPU backend whose attention is all causal.
        """
        if not isinstance(paged, PagedStep) or not isinstance(paged.backend, CpuBackend):
            return None
        if paged.batch.images:
            return None
        cache = paged.cache
        inputs = [
            AttentionInputs(None if rope is None else angles[rope], keys, values, paged.batch)
            for rope, keys, values in zip(self._ropes, cache.keys, cache.values, strict=True)
        ]
        return self._layers(hidden, inputs, rows)


def _layer(layer: Layer) -> PreparedLayer:
    if layer.is_parallel or layer.residual_scale != 1.0:
        raise NoKernelError("its residual adds are parallel or scaled")
    if not isinstance(layer.mlp, MLP):
        raise NoKernelError("it has experts")
    before, after, before_mlp, after_mlp = (
        None if norm is None else _norm(norm) for norm in layer.norms
    )
    norms: LayerNorms = before, after, before_mlp, after_mlp
    return PreparedLayer(norms, _attention(layer.attention), _mlp(layer.mlp))


def _norm(norm: Norm) -> PreparedNorm:
    if not isinstance(norm, RMSNorm):
        raise NoKernelError("its norms subtract the mean")
    kind = norm.kind
    return PreparedNorm(norm.weight, norm.eps, offset=kind.offset, rounds_first=kind.rounds_first)


def _mlp(mlp: MLP) -> PreparedMLP:
    activation = FUSED.get(mlp.activation)
    if activation is None or not mlp.is_gated:
        raise NoKernelError(f"{mlp.activation} has no kernel, or the MLP has no gate")
    return PreparedMLP(_prepared(mlp.gate_up), _prepared(mlp.down), activation)


def _attention(attention: Attention) -> PreparedAttention:
    spec = attention.spec
    if spec.qk_norm == "after rotary" or spec.qkv_clip is not None:
        raise NoKernelError("its queries and keys are normalized after rotation, or clipped")
    norms = None
    if attention.norms:
        norms = _norm(attention.norms[0]), _norm(attention.norms[1])
    heads = Heads(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        key_dim=spec.head_dim,
        value_dim=spec.head_dim,
        rotary_dim=attention.rotary_dim,
        scale=attention.layer.scale,
        window=attention.layer.window,
        softcap=spec.softcap,
        sinks=None if attention.sinks is None else attention.sinks.float(),
        norms=norms,
    )
    qkv, out = _prepared(attention.qkv), _prepared(attention.out)
    if not PreparedAttention.supports(qkv, out, heads):
        raise NoKernelError("its heads have unsupported sizes")
    return PreparedAttention(qkv, out, heads)


def _prepared(linear: Linear) -> PreparedLinear:
    format = linear.format
    if not isinstance(format, Panels | Integers):
        raise NoKernelError("its weights are not in panels")
    prepared = format.prepared(linear.bias, linear.dtype)
    if prepared.dtype != linear.dtype:
        raise NoKernelError(f"its {linear.dtype} rows must be cast to {prepared.dtype}")
    return prepared
