"""One decoder for all families of the table: embedding, layers, norm, head.

Rows are tokens of many sequences, one after the other: [T, hidden], nothing padded. Each layer
calls attention once, `paged.attend`, which writes the keys and values of these tokens into the KV
cache and reads those of their sequences by block table. `Linear` knows how a weight is stored, the
table in `engine.model.families` how a family differs from Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.call import AttendsPaged, AttentionCall
from engine.model.activations import make_gated, make_plain
from engine.model.experts import Experts
from engine.model.families import ExpertNames
from engine.model.loader import Loader, Source
from engine.model.norms import Norm
from engine.model.rotary import Angles, Rotary
from engine.model.spec import DecoderSpec

AnglesByRope = Mapping[str, Angles]
Progress = Callable[[Sequence[int]], Iterable[int]]
"""Is handed the layers to come, and may show how far that is."""


class RunsLayers(Protocol):
    """All layers at once, as `engine.model.native` does on a CPU."""

    def computes(self, paged: AttendsPaged) -> bool: ...

    def __call__(
        self, hidden: Tensor, angles: AnglesByRope, paged: Any, rows: Tensor | None
    ) -> Tensor: ...


class Decoder:
    """Token ids in, logits out."""

    def __init__(
        self, loader: Loader, spec: DecoderSpec, num_layers: int, progress: Progress = iter
    ) -> None:
        """num_layers: the first ones; the rest of the checkpoint is left alone then."""
        family, width = spec.family, spec.hidden_size
        prefix = family.prefix
        self.spec, self.shapes = spec, spec.shapes
        embedding = f"{prefix}{family.embedding}.weight"
        if spec.is_tied and embedding not in loader.checkpoint:
            embedding = f"{family.head}.weight"  # some files have the head's name for both
        self.embedding = loader.tensor(embedding, spec.vocab_size, width)
        self._positions = _positions(loader, spec)
        self.rotary = Rotary(spec, loader.device, loader.dtype)
        self.layers = [
            Layer(loader, spec, index, self.rotary) for index in progress(range(num_layers))
        ]
        self.norm = loader.norm(
            f"{prefix}{family.final_norm}", (width,), family.norm, spec.norm_eps
        )
        self.head = loader.head(family.head, spec.vocab_size, self.embedding, is_tied=spec.is_tied)
        self.linears = loader.linears
        self.num_bytes = loader.num_bytes
        self.native: RunsLayers | None = None
        """Computes the layers in place of `layers`, where there is such a thing."""
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=loader.dtype).item()

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        paged: AttendsPaged,
        *,
        has_adapters: bool = False,
    ) -> Tensor:
        """Logits [R, vocabulary] of the tokens `rows` [R] int64 out of T. Ids, positions: [T].

        has_adapters: some of these tokens have an adapter.
        """
        hidden = self.embed(token_ids, positions)
        angles = self.rotary(positions)
        if has_adapters or len(rows) >= len(hidden):
            hidden = self._run(hidden, angles, paged, None, has_adapters)
            return self.logits(hidden.index_select(0, rows))
        return self.logits(self._run(hidden, angles, paged, rows, has_adapters))

    def _run(
        self,
        hidden: Tensor,
        angles: AnglesByRope,
        paged: AttendsPaged,
        rows: Tensor | None,
        has_adapters: bool,
    ) -> Tensor:
        """All layers. rows: the tokens that are still wanted after the last; None: all."""
        if self.native is not None and not has_adapters and self.native.computes(paged):
            return self.native(hidden, angles, paged, rows)
        *others, last = self.layers
        for layer in others:
            hidden = layer(hidden, angles, paged)
        return last(hidden, angles, paged, rows)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[T, hidden]."""
        hidden = F.embedding(token_ids, self.embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        if self._positions is not None:
            offset = self.spec.family.position_offset
            hidden = hidden + F.embedding(positions + offset, self._positions)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] after the last layer → [R, vocabulary]."""
        logits = self.head(self.norm(hidden))
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class Layer:
    """`x += attention(norm(x)); x += mlp(norm(x))`, with norms where the family has them."""

    def __init__(self, loader: Loader, spec: DecoderSpec, index: int, rotary: Rotary) -> None:
        family = spec.family
        name = f"{family.prefix}{family.layers}.{index}"
        self.norms = [
            loader.norm(f"{name}.{norm}", (spec.hidden_size,), family.norm, spec.norm_eps)
            if norm
            else None
            for norm in spec.norms
        ]
        self.attention = Attention(loader, spec, index, f"{name}.{family.attention}", rotary)
        self.mlp = _mlp(loader, spec, index, name)
        self.is_parallel = spec.is_parallel
        self.residual_scale = spec.residual_scale

    def __call__(
        self,
        hidden: Tensor,
        angles: AnglesByRope,
        paged: AttendsPaged,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[T, hidden] → the same; or [R, hidden], where only the tokens `rows` are still wanted."""
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        normed = hidden if before_attention is None else before_attention(hidden)
        attended = self.attention(normed, angles, paged, rows)
        if rows is not None:
            hidden, normed = hidden.index_select(0, rows), normed.index_select(0, rows)
        if after_attention is not None:
            attended = after_attention(attended)
        if self.is_parallel:
            output = self.mlp(normed if before_mlp is None else before_mlp(hidden))
            return hidden + attended + output
        hidden = torch.add(hidden, attended, alpha=self.residual_scale)
        output = self.mlp(hidden if before_mlp is None else before_mlp(hidden))
        if after_mlp is not None:
            output = after_mlp(output)
        return torch.add(hidden, output, alpha=self.residual_scale)


class Attention:
    """Projects to queries, keys and values, rotates, attends over the KV cache, projects back."""

    def __init__(
        self, loader: Loader, spec: DecoderSpec, index: int, name: str, rotary: Rotary
    ) -> None:
        family, dim = spec.family, spec.head_dim
        self.spec, self.index, self.layer = spec, index, spec.layers[index]
        rope = self.layer.rope
        self.rotary_dim = 0 if rope is None else rotary.width(rope)
        order = None
        if family.rotary == "pairs" and rope is not None:
            order = _halves_of_pairs(dim, self.rotary_dim)
        self._sizes = [dim * heads for heads in (spec.num_heads, *[spec.num_kv_heads] * 2)]
        self.qkv = loader.linear(_qkv(spec, name, self._sizes, order), spec.hidden_size)
        self.out = loader.linear([Source(f"{name}.{family.out}", spec.hidden_size)], self._sizes[0])
        self.norms = _qk_norms(loader, spec, name, order)
        self.sinks = loader.optional(f"{name}.sinks", spec.num_heads)
        self._rotate = loader.elementwise.rotary

    def __call__(
        self,
        hidden: Tensor,
        angles: AnglesByRope,
        paged: AttendsPaged,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[T, hidden] → the same, or of the tokens `rows` alone."""
        kind, clip, dim = self.spec.qk_norm, self.spec.qkv_clip, self.spec.head_dim
        query, key, value = self.qkv(hidden).split_with_sizes(self._sizes, -1)
        if kind == "row":
            query, key = self.norms[0](query), self.norms[1](key)
        if clip is not None:
            query, key, value = (part.clamp(-clip, clip) for part in (query, key, value))
        query, key, value = (part.unflatten(-1, (-1, dim)) for part in (query, key, value))
        if kind == "head":
            query, key = self.norms[0](query), self.norms[1](key)
        if self.layer.rope is not None:
            self._rotate(query, key, *angles[self.layer.rope], self.rotary_dim)
        if kind == "after rotary":
            query, key = self.norms[0](query), self.norms[1](key)
        call = AttentionCall(
            layer=self.index,
            query=query,
            key=key,
            value=value,
            scale=self.layer.scale,
            window=self.layer.window,
            softcap=self.spec.softcap,
            sinks=self.sinks,
        )
        attended = paged.attend(call).flatten(1)
        return self.out(attended if rows is None else attended.index_select(0, rows))


class MLP:
    """`down(activation(gate(x)) * up(x))`; without a gate, `down(activation(up(x)))`."""

    def __init__(
        self, loader: Loader, spec: DecoderSpec, block: str, width: int | None = None
    ) -> None:
        """width: of the layer between; None: what the config says."""
        family = spec.family
        width = width or spec.mlp_width
        total = 2 * width if family.is_gated else width
        names = [f"{block}.{name}" for name in family.gate_up]
        sources = [Source(name, total // len(names)) for name in names]
        self.gate_up = loader.linear(sources, spec.hidden_size)
        self.down = loader.linear([Source(f"{block}.{family.down}", spec.hidden_size)], width)
        self.activation, self.is_gated = spec.activation, family.is_gated
        self._activate = (
            make_gated(spec.activation, loader)
            if family.is_gated
            else make_plain(spec.activation, loader, block)
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self._activate(self.gate_up(hidden)))


class SharedExperts:
    """Experts, and beside them an MLP that sees every token, as strongly as a gate says."""

    def __init__(self, loader: Loader, spec: DecoderSpec, block: str, names: ExpertNames) -> None:
        config: Any = spec.config
        self._experts = Experts(loader, spec, block, names)
        self._shared = MLP(
            loader, spec, f"{block}.{names.shared}", config.shared_expert_intermediate_size
        )
        self._gate = loader.linear([Source(f"{block}.{names.shared}_gate", 1)], spec.hidden_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._experts(hidden) + torch.sigmoid(self._gate(hidden)) * self._shared(hidden)


def _mlp(loader: Loader, spec: DecoderSpec, index: int, name: str) -> MLP | Experts | SharedExperts:
    family = spec.family
    names = family.experts
    if names is None or not spec.layers[index].has_experts:
        return MLP(loader, spec, f"{name}.{family.mlp}" if family.mlp else name)
    kind = SharedExperts if names.shared else Experts
    return kind(loader, spec, f"{name}.{names.block}", names)


def _qkv(spec: DecoderSpec, name: str, sizes: list[int], order: Tensor | None) -> list[Source]:
    """order: of the elements of each head of queries and keys; None: as they are."""
    family, dim = spec.family, spec.head_dim
    names = [f"{name}.{each}" for each in family.qkv]
    if family.qkv_by_head:
        rows = torch.arange(sum(sizes)).view(spec.num_heads, 3, dim)
        return [Source(names[0], sum(sizes), rows.transpose(0, 1).flatten())]
    if len(names) == 1:
        return [Source(names[0], sum(sizes))]
    orders: list[Tensor | None] = [None] * 3
    if order is not None:
        orders[:2] = [(torch.arange(0, size, dim)[:, None] + order).flatten() for size in sizes[:2]]
    return [Source(*each) for each in zip(names, sizes, orders, strict=True)]


def _halves_of_pairs(dim: int, rotary_dim: int) -> Tensor:
    """[dim] int64: an order of a head's elements in which those that turn together are half of
    `rotary_dim` apart. Products of queries and keys, both in this order, are the same."""
    turned = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    return torch.cat([turned, torch.arange(rotary_dim, dim)])


def _qk_norms(loader: Loader, spec: DecoderSpec, name: str, order: Tensor | None) -> list[Norm]:
    """Of queries and of keys, where there are any."""
    family = spec.family
    if not spec.qk_norm:
        return []
    norms: list[Norm] = []
    for norm, heads in zip(family.qk_norm_names, (spec.num_heads, spec.num_kv_heads), strict=True):
        shape: tuple[int, ...] = (spec.head_dim,)
        if spec.qk_norm == "row":
            shape = (heads * spec.head_dim,)
        elif family.norm.subtracts_mean:
            shape = (heads, spec.head_dim)
        norms.append(loader.norm(f"{name}.{norm}", shape, family.norm, spec.norm_eps, order))
    return norms


def _positions(loader: Loader, spec: DecoderSpec) -> Tensor | None:
    """[positions, hidden], where they are learned."""
    family, config = spec.family, spec.config
    if not family.positions:
        return None
    length = config.max_position_embeddings + family.position_offset
    return loader.tensor(f"{family.prefix}{family.positions}.weight", length, spec.hidden_size)
