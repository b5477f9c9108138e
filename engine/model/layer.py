"""A layer of the decoder: attention, and an MLP or experts.

Every part computes in two ways. A call computes at once, on any device. `prepare` adds the same
computation to the calls of the CPU library, for buffers that all steps share; it raises
NoKernelError if the library has no kernel for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.call import AttentionCall, PagedAttention, Rotation
from engine.model.activations import FUSED, make_gated, make_plain
from engine.model.heads import elements_of, halves_of_pairs, load_qk_norms, qkv_sources
from engine.model.loader import Loader, Source
from engine.model.norms import Norm, add_and_norm, norm_of_all_heads
from engine.model.rotary import Rotary, StepAngles
from engine.model.spec import DecoderSpec
from kernels.cpu.calls import NoKernelError
from kernels.cpu.elementwise import gated
from kernels.cpu.step_calls import StepCalls

if TYPE_CHECKING:
    from engine.model.latent_attention import LatentAttention
    from engine.model.mixers.mixer import Mixer
    from engine.model.mixtures.experts import Experts


class Layer:
    """`x += attention(norm(x)); x += mlp(norm(x))`; families place their norms differently.

    A layer does not add its last output to the residual stream. The next norm (of the next layer,
    or the final one) does, in one kernel. So a layer takes and returns two tensors: `hidden`, the
    residual stream, and `output`, which is still to be added to it.
    """

    def __init__(self, loader: Loader, spec: DecoderSpec, index: int, rotary: Rotary) -> None:
        name = layer_name(spec, index)
        self.norms = load_layer_norms(loader, spec, name)
        self.attention = make_attention(loader, spec, index, name, rotary)
        self.mlp = load_mlp(loader, spec, index, name)
        self.is_parallel = spec.is_parallel
        self.residual_scale = spec.residual_scale

    def __call__(
        self,
        hidden: Tensor,
        output: Tensor | None,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream and the output still to be added to it, [T, hidden] each.

        hidden, output: the same two tensors from the previous layer; the first layer gets no
        output. rows: return only these rows, [R, hidden].
        """
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        hidden, normed = add_and_norm(hidden, output, before_attention, self.residual_scale)
        attended = self.attention(normed, angles, paged, rows)
        if rows is not None:
            hidden, normed = hidden.index_select(0, rows), normed.index_select(0, rows)
        if after_attention is not None:
            attended = after_attention(attended)
        if self.is_parallel:
            output = self.mlp(normed if before_mlp is None else before_mlp(hidden))
            return hidden + attended, output
        hidden, normed = add_and_norm(hidden, attended, before_mlp, self.residual_scale)
        output = self.mlp(normed)
        return hidden, output if after_mlp is None else after_mlp(output)

    def prepare(self, calls: StepCalls) -> None:
        """Have `calls` add the layer's outputs to the residual stream, `calls.hidden`."""
        if self.is_parallel:
            raise NoKernelError("its attention and its MLP are parallel")
        if not isinstance(self.mlp, MLP):
            raise NoKernelError("it has experts")
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        # torch rounds the factor of a sum, too.
        calls.residual_scale = torch.tensor(self.residual_scale, dtype=calls.hidden.dtype).item()
        prepare_part(calls, before_attention, self.attention, after_attention)
        prepare_part(calls, before_mlp, self.mlp, after_mlp)


def layer_name(spec: DecoderSpec, index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"{spec.family.prefix}{spec.family.layers}.{index}"


def load_layer_norms(loader: Loader, spec: DecoderSpec, name: str) -> list[Norm | None]:
    """Load a layer's norms, in the order of `Family.norms`. name: that of `layer_name`."""
    return [
        loader.norm(f"{name}.{norm}", (spec.hidden_size,), spec.family.norm, spec.norm_eps)
        if norm
        else None
        for norm in spec.norms
    ]


def prepare_part(
    calls: StepCalls,
    before: Norm | None,
    part: Attention | LatentAttention | Mixer | MLP,
    after: Norm | None,
) -> None:
    """Have `calls` compute `hidden += after(part(before(hidden)))`. Raises NoKernelError."""
    hidden = calls.hidden
    normed = calls.buffer("normed", hidden.shape[1])
    rows = hidden if before is None else before.prepare(calls, hidden, normed)
    if after is None:
        part.prepare(calls, rows, hidden, residual=hidden)
    elif calls.residual_scale != 1.0:
        raise NoKernelError("no norm scales what it adds")
    else:
        part.prepare(calls, rows, normed)
        after.prepare(calls, normed, hidden, residual=hidden)


class Attention:
    """Self-attention over the KV cache, with rotary embedding and optional q/k norms."""

    def __init__(
        self,
        loader: Loader,
        spec: DecoderSpec,
        index: int,
        name: str,
        rotary: Rotary,
        in_features: int | None = None,
    ) -> None:
        """in_features: of the rows that it reads; None: the model's hidden size."""
        family, layer = spec.family, spec.layers[index]
        self.spec, self.index, self.layer = spec, spec.cache_index(index), layer
        self.dim = dim = layer.head_dim
        rope = layer.rope
        self.rotary_dim = 0 if rope is None else rotary.width(rope)
        order = None
        if family.rotary == "pairs" and rope is not None:
            order = halves_of_pairs(dim, self.rotary_dim)
        heads = loader.shard.heads(spec.num_heads, layer.num_kv_heads)
        self._sizes = [dim * len(part) for part in (heads.queries, heads.keys, heads.keys)]
        self._gate_width = self._sizes[0] if family.gates_attention else 0
        sources = qkv_sources(spec, layer, name, heads, order)
        self.qkv = loader.linear(sources, in_features or spec.hidden_size)
        self.out = loader.linear(
            [Source(f"{name}.{family.out}", spec.hidden_size)],
            spec.num_heads * dim,
            columns=elements_of(heads.queries, dim),
        )
        self.norms = load_qk_norms(loader, spec, layer, name, heads, order)
        self._norm_both = None
        """Norms query heads and key heads together, as they lie side by side in memory."""
        if spec.qk_norm in ("head", "after rotary") and spec.qkv_clip is None:
            self._norm_both = norm_of_all_heads(self.norms, (len(heads.queries), len(heads.keys)))
        self.sinks = loader.optional(f"{name}.sinks", spec.num_heads)
        if self.sinks is not None:
            self.sinks = self.sinks[heads.queries.start : heads.queries.stop]
        self._rotate, self._gate = loader.elementwise.rotary, loader.elementwise.sigmoid_gate

    def __call__(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [T, hidden], or only its `rows`, [R, hidden]."""
        kind, clip, dim = self.spec.qk_norm, self.spec.qkv_clip, self.dim
        gates, merged = self._split_gates(self.qkv(hidden))
        query, key, value = merged.split_with_sizes(self._sizes, -1)
        if kind == "row":
            query, key = self.norms[0](query), self.norms[1](key)
        if clip is not None:
            query, key, value = (part.clamp(-clip, clip) for part in (query, key, value))
        query, key, value = (part.unflatten(-1, (-1, dim)) for part in (query, key, value))
        if kind == "head":
            query, key = self._norm_heads(query, key, merged)
        rotation = None
        if self.layer.rope is not None:
            rotation = Rotation(*angles.by_rope[self.layer.rope], self.rotary_dim)
        if kind == "after rotary":
            if rotation is not None:
                self._rotate(query, key, *rotation)
                rotation = None
            query, key = self._norm_heads(query, key, merged)
        if angles.query_scale is not None:
            query = query * angles.query_scale
        call = AttentionCall(
            layer=self.index,
            query=query,
            key=key,
            value=value,
            scale=self.layer.scale,
            window=self.layer.window,
            softcap=self.spec.softcap,
            sinks=self.sinks,
            rotation=rotation,
        )
        attended = paged.attend(call).flatten(1)
        if gates is not None:
            attended = self._gate(gates, attended)
        return self.out(attended if rows is None else attended.index_select(0, rows))

    def _split_gates(self, merged: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gates of attention's output, if there are any, and q, k and v."""
        if not self._gate_width:
            return None, merged
        return merged[:, : self._gate_width], merged[:, self._gate_width :]

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Have `calls` write attention's output to `out`, which may be `rows`, all [T, hidden].

        residual: as in `Linear.prepare`.
        """
        spec, dim = self.spec, self.dim
        if spec.qk_norm == "after rotary" or spec.qkv_clip is not None:
            raise NoKernelError("its queries and keys are normalized after rotation, or clipped")
        if spec.query_scaling is not None:
            raise NoKernelError("its queries are scaled by their positions")
        both = calls.buffer("inner", self._gate_width + sum(self._sizes))
        self.qkv.prepare(calls, rows, both)
        gates, merged = self._split_gates(both)
        query, key, value = merged.split_with_sizes(self._sizes, -1)
        if self.norms:
            query = self._prepare_norm(calls, self.norms[0], query, "queries")
            key = self._prepare_norm(calls, self.norms[1], key, "keys")
        query, key, value = (part.unflatten(-1, (-1, dim)) for part in (query, key, value))
        if self.layer.rope is not None:
            calls.rotate(self.layer.rope, query, key, self.rotary_dim)
        attended = calls.attend(
            self.index,
            query,
            key,
            value,
            scale=self.layer.scale,
            window=self.layer.window,
            softcap=spec.softcap,
            sinks=self.sinks,
        ).flatten(1)
        if gates is not None:
            calls.add_reads(gates)
            calls.add(gated(gates, attended, "sigmoid", out=attended))
        self.out.prepare(calls, attended, out, residual)

    def _prepare_norm(self, calls: StepCalls, norm: Norm, rows: Tensor, name: str) -> Tensor:
        """Have `calls` norm rows, [T, heads * head_dim], to the buffer `name`."""
        out = calls.buffer(name, rows.shape[1])
        if self.spec.qk_norm == "row":
            return norm.prepare(calls, rows, out)
        by_head = (-1, self.dim)
        return norm.prepare(calls, rows.unflatten(1, by_head), out.unflatten(1, by_head)).flatten(1)

    def _norm_heads(self, query: Tensor, key: Tensor, merged: Tensor) -> tuple[Tensor, Tensor]:
        """Norm query and key, [T, heads, head_dim], which are slices of `merged`."""
        if self._norm_both is None:
            return self.norms[0](query), self.norms[1](key)
        both = merged.narrow(-1, 0, sum(self._sizes[:2])).unflatten(-1, (-1, self.dim))
        query, key = self._norm_both(both).split_with_sizes((query.shape[1], key.shape[1]), 1)
        return query, key


class MLP:
    """`down(activation(gate(x)) * up(x))`; without a gate, `down(activation(up(x)))`."""

    def __init__(self, loader: Loader, spec: DecoderSpec, block: str, width: int) -> None:
        """block: the MLP's name in the checkpoint. width: intermediate size."""
        family = spec.family
        columns = loader.shard.columns(width)
        total = 2 * width if family.is_gated else width
        names = [f"{block}.{name}" for name in family.gate_up]
        order = None
        if len(columns) < width:
            order = torch.arange(columns.start, columns.stop)
            if total // len(names) > width:  # gate and up are one tensor
                order = torch.cat([order, order + width])
        sources = [Source(name, total // len(names), order) for name in names]
        self.gate_up = loader.linear(sources, spec.hidden_size)
        down = [Source(f"{block}.{family.down}", spec.hidden_size)]
        self.down = loader.linear(down, width, columns=columns)
        self.activation, self.is_gated = spec.activation, family.is_gated
        self._activate = (
            make_gated(spec.activation, loader)
            if family.is_gated
            else make_plain(spec.activation, loader, block)
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self._activate(self.gate_up(hidden)))

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Have `calls` write the output to `out`, which may be `rows`, all [T, hidden].

        residual: as in `Linear.prepare`.
        """
        activation = FUSED.get(self.activation)
        if activation is None or not self.is_gated:
            raise NoKernelError(f"{self.activation} has no kernel, or the MLP has no gate")
        width = len(self.down.columns)
        gate_up = calls.buffer("inner", 2 * width)
        self.gate_up.prepare(calls, rows, gate_up)
        gates, ups = gate_up.chunk(2, 1)
        calls.add(gated(gates, ups, activation, out=gates))
        self.down.prepare(calls, gates, out, residual)


def make_attention(
    loader: Loader, spec: DecoderSpec, index: int, layer: str, rotary: Rotary
) -> Attention | LatentAttention | Mixer:
    """Load the attention of layer `index`, or what takes its place or stands beside it.

    layer: the layer's name in the checkpoint.
    """
    name = f"{layer}.{spec.family.attention}"
    if spec.layers[index].state:
        from engine.model.mixers.choose import BesideAttention, make_mixer

        mixer = make_mixer(loader, spec, index, f"{layer}.{spec.family.state}")
        if not spec.layers[index].has_attention:
            return mixer
        return BesideAttention(mixer, Attention(loader, spec, index, name, rotary))
    if spec.latent is None:
        return Attention(loader, spec, index, name, rotary)
    from engine.model.latent_attention import LatentAttention

    return LatentAttention(loader, spec, index, name, rotary)


def load_mlp(loader: Loader, spec: DecoderSpec, index: int, name: str) -> MLP | Experts:
    """Load the feed-forward block of layer `index`, whose name in the checkpoint is `name`."""
    family = spec.family
    names = family.experts
    if names is None or not spec.layers[index].has_experts:
        block = f"{name}.{family.mlp}" if family.mlp else name
        return MLP(loader, spec, block, spec.layers[index].mlp_width)
    from engine.model.mixtures.experts import Experts, SharedExperts, shared_width

    block = f"{name}.{names.block}"
    width = shared_width(spec, index) if names.shared else 0
    if width == 0:
        return Experts(loader, spec, index, block, names)
    shared_name = f"{name if names.shared_is_beside else block}.{names.shared}"
    shared = MLP(loader, spec, shared_name, width)
    return SharedExperts(loader, spec, index, block, names, shared)
