"""A layer of the encoder: attention and an MLP, over rows without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from engine.attention.call import UnsupportedModelError
from engine.encoder.families import EncoderFamily
from engine.encoder.texts import PackedTexts, Sight
from engine.model.activations import FUSED, Activation
from engine.model.families import RMS
from engine.model.linear import Linear
from engine.model.loader import Loader, Source
from engine.model.norms import LayerNorm, Norm, RMSNorm
from kernels.cpu.attention import attention
from kernels.cpu.calls import NoKernelError
from kernels.cpu.elementwise import ACTIVATIONS, gated
from kernels.cpu.step_calls import StepCalls

Angles = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers read in a forward pass."""

    texts: PackedTexts
    angles: Angles
    """cos and sin [T, rotary_dim] for each kind of layer; empty if layers do not rotate."""
    bias: Tensor | None
    """As in `PackedTexts.attend`."""


class EncoderLayer:
    """`x = norm(x + attention(x)); x = norm(x + mlp(x))`; some families norm before both."""

    def __init__(
        self,
        loader: Loader,
        family: EncoderFamily,
        config: Any,
        module: nn.Module,
        name: str,
        kind: str,
    ) -> None:
        """module: transformers' layer. name: the module's, which begins its tensors' names.
        kind: that of `layer_kinds`."""
        self._kind = kind
        self._sight = _sight(family, config, kind)
        self._head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._num_heads = [config.num_attention_heads, num_kv_heads, num_kv_heads]
        self._qkv = _linear(loader, module, name, family.qkv)
        self._qk_norms = [load_norm(loader, module, norm) for norm in family.qk_norms]
        self._out = _linear(loader, module, name, [family.out])
        self._gate_up = _linear(loader, module, name, family.gate_up)
        self._down = _linear(loader, module, name, [family.down])
        self._num_inner = max(part.rows.stop for part in self._gate_up.parts.values())
        self._is_gated = self._num_inner > self._down.in_features
        name = getattr(config, family.activation)
        self._activate = _activation(loader, name, is_gated=self._is_gated)
        self._activation: str = FUSED.get(name, name)
        self._rotate = loader.elementwise.rotary
        self._attention_norm = load_norm(loader, module, family.attention_norm)
        self._mlp_norm = load_norm(loader, module, family.mlp_norm)
        self._norms_first = family.norms_first

    def __call__(self, hidden: Tensor, step: Pass) -> Tensor:
        """Return the rows [T, hidden] for the next layer."""
        if self._norms_first:
            hidden = hidden + self._attention(_normed(self._attention_norm, hidden), step)
            return hidden + self._mlp(_normed(self._mlp_norm, hidden))
        hidden = _normed(self._attention_norm, hidden + self._attention(hidden, step))
        return _normed(self._mlp_norm, hidden + self._mlp(hidden))

    def prepare(self, calls: StepCalls, angles: Angles) -> None:
        """Have `calls` overwrite the rows, `calls.hidden`, with those for the next layer.

        angles: as in `Pass`. Raises NoKernelError.
        """
        hidden = calls.hidden
        for norm, part in (
            (self._attention_norm, partial(self._prepare_attention, angles=angles)),
            (self._mlp_norm, self._prepare_mlp),
        ):
            rows = hidden
            if self._norms_first and norm is not None:
                rows = norm.prepare(calls, hidden, calls.buffer("normed", hidden.shape[1]))
            part(calls, rows)
            if not self._norms_first and norm is not None:
                norm.prepare(calls, hidden, hidden)

    def _prepare_attention(self, calls: StepCalls, rows: Tensor, angles: Angles) -> None:
        """Have `calls` add the attention of the rows to `calls.hidden`."""
        merged = calls.buffer("inner", sum(self._num_heads) * self._head_dim)
        self._qkv.prepare(calls, rows, merged)
        heads = merged.unflatten(1, (-1, self._head_dim))
        query, key, value = heads.split_with_sizes(self._num_heads, 1)
        if self._qk_norms:
            query = _prepare_norm(calls, self._qk_norms[0], query, "queries")
            key = _prepare_norm(calls, self._qk_norms[1], key, "keys")
        if angles:
            calls.rotate(self._kind, query, key, angles[self._kind][0].shape[1])
        attended = calls.buffer("attended", self._num_heads[0] * self._head_dim)
        kernel = attention(
            query,
            key[:, None],
            value[:, None],
            attended.view_as(query),
            scale=self._head_dim**-0.5,
            window=self._sight.before,
            after=self._sight.after,
        )
        calls.add_placed(kernel, kernel.arguments.set_batch, attended)
        self._out.prepare(calls, attended, calls.hidden, residual=calls.hidden)

    def _prepare_mlp(self, calls: StepCalls, rows: Tensor) -> None:
        """Have `calls` add the MLP of the rows to `calls.hidden`."""
        if self._activation not in ACTIVATIONS:
            raise NoKernelError(f"{self._activation} has no kernel")
        inner = calls.buffer("inner", self._num_inner)
        fused = "" if self._is_gated else self._activation
        self._gate_up.prepare(calls, rows, inner, activation=fused)
        if self._is_gated:
            gates, up = inner.tensor_split(2, 1)
            calls.add(gated(gates, up, self._activation, out=gates))
            inner = gates
        self._down.prepare(calls, inner, calls.hidden, residual=calls.hidden)

    def _attention(self, hidden: Tensor, step: Pass) -> Tensor:
        heads = self._qkv(hidden).unflatten(-1, (-1, self._head_dim))
        query, key, value = heads.split_with_sizes(self._num_heads, 1)
        if self._qk_norms:
            query, key = map(_normed, self._qk_norms, (query, key))
        if step.angles:
            cos, sin = step.angles[self._kind]
            self._rotate(query, key, cos, sin, cos.shape[1])
        attended = step.texts.attend(query, key, value, self._sight, step.bias)
        return self._out(attended.flatten(1))

    def _mlp(self, hidden: Tensor) -> Tensor:
        return self._down(self._activate(self._gate_up(hidden)))


def layer_kinds(config: Any, num_layers: int) -> list[str]:
    """Return transformers' names of the layers' kinds; all are '' if there is one kind."""
    return (getattr(config, "layer_types", None) or [""] * num_layers)[:num_layers]


def load_norm(loader: Loader, module: nn.Module, name: str) -> Norm | None:
    """Return our norm with the weights of a submodule; None if it does nothing."""
    norm: Any = module.get_submodule(name)
    if isinstance(norm, nn.Identity):
        return None
    if isinstance(norm, nn.LayerNorm):
        return LayerNorm(norm.weight, norm.bias, norm.eps, loader.elementwise)
    if not hasattr(norm, "variance_epsilon"):
        raise UnsupportedModelError(f"{name} is a {type(norm).__name__}")
    return RMSNorm(norm.weight, norm.variance_epsilon, RMS, loader.elementwise)


def _normed(norm: Norm | None, rows: Tensor) -> Tensor:
    return rows if norm is None else norm(rows)


def _prepare_norm(calls: StepCalls, norm: Norm | None, heads: Tensor, name: str) -> Tensor:
    """Have `calls` norm heads [T, heads, head_dim] to the buffer `name`."""
    if norm is None:
        return heads
    out = calls.buffer(name, heads.shape[1] * heads.shape[2])
    return norm.prepare(calls, heads, out.view(heads.shape))


def _sight(family: EncoderFamily, config: Any, kind: str) -> Sight:
    window = getattr(config, "sliding_window", None)
    if not family.is_causal:
        return Sight(window=window if kind == "sliding_attention" else None)
    if window is None or kind == "full_attention":
        return Sight(is_causal=getattr(config, "is_causal", True))
    return Sight(window=window - 1, is_causal=getattr(config, "is_causal", True))


def _linear(loader: Loader, module: nn.Module, name: str, parts: Sequence[str]) -> Linear:
    linears: list[Any] = [module.get_submodule(part) for part in parts]
    sources = [
        Source(f"{name}.{part}", linear.out_features)
        for part, linear in zip(parts, linears, strict=True)
    ]
    return loader.linear(sources, linears[0].in_features)


def _activation(loader: Loader, name: str, *, is_gated: bool) -> Activation:
    """Return the activation between the MLP's linear layers, [T, inner] to [T, down's inputs]."""
    activation: Activation = ACT2FN[name]
    if not is_gated:
        return activation
    kernel, fused = loader.elementwise.gated_activation, FUSED.get(name)
    if fused is not None:
        return lambda gate_up: kernel(gate_up, fused)

    def compute(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    return compute
