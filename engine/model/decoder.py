"""The decoder of all supported model families: embedding, layers, final norm, head.

One forward pass computes the T tokens of all sequences of a step as one flat batch, [T, hidden],
without padding. Each layer calls `paged.attend` once, which writes the tokens' keys and values to
the KV cache and attends over the block tables of their sequences. A `Linear` hides how its weight
is stored; `engine.model.families` lists how each family differs from Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from engine.attention.call import AttentionCall, PagedAttention, Rotation
from engine.model.activations import make_gated, make_plain
from engine.model.experts import Experts
from engine.model.families import ExpertNames
from engine.model.heads import elements_of, halves_of_pairs, load_qk_norms, qkv_sources
from engine.model.loader import Loader, Source
from engine.model.norms import add_and_norm, norm_of_all_heads
from engine.model.rotary import Angles, Rotary
from engine.model.spec import DecoderSpec
from engine.step_inputs import ImageTokens

AnglesByRope = Mapping[str, Angles]
LayerRunner = Callable[[Tensor, AnglesByRope, PagedAttention, Tensor | None], Tensor | None]
"""Runs all layers in one call, given hidden states, angles, the attention and the rows to keep.
Returns None for a step that it does not support. `engine.model.native` has one for CPUs."""


class Decoder:
    """A decoder-only model: token ids in, logits out."""

    def __init__(
        self, loader: Loader, spec: DecoderSpec, num_layers: int, *, show_progress: bool = False
    ) -> None:
        """Load the first `num_layers` layers, the embeddings, the final norm and the head.

        show_progress: show a progress bar if stderr is a terminal.
        """
        family, width = spec.family, spec.hidden_size
        prefix = family.prefix
        self.spec = spec
        num_kv_heads = len(loader.group.shard.heads(spec.num_heads, spec.num_kv_heads).keys)
        self.shapes = [replace(shape, num_kv_heads=num_kv_heads) for shape in spec.shapes]
        """This rank's part of the KV cache, for each layer of the model."""
        embedding = f"{prefix}{family.embedding}.weight"
        if spec.is_tied and embedding not in loader.checkpoint:
            embedding = f"{family.head}.weight"  # some checkpoints store only the head
        self.group = loader.group
        self.embedding = loader.embedding(embedding, spec.vocab_size, width)
        self._position_embedding = _load_position_embedding(loader, spec)
        self.rotary = Rotary(spec, loader.device, loader.dtype)
        # None hides the bar unless stderr is a terminal.
        indices = tqdm(range(num_layers), "loading layers", disable=None if show_progress else True)
        self.layers = [Layer(loader, spec, index, self.rotary) for index in indices]
        self.norm = loader.norm(
            f"{prefix}{family.final_norm}", (width,), family.norm, spec.norm_eps
        )
        self.head = loader.head(family.head, spec.vocab_size, self.embedding, is_tied=spec.is_tied)
        self.linears = loader.linears
        self.num_bytes, self.num_weights = loader.num_bytes, loader.num_weights
        self.native: LayerRunner | None = None
        """Runs all layers in place of `layers`, in the steps that it supports. None: no runner
        supports this decoder."""
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=loader.dtype).item()

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        paged: PagedAttention,
        *,
        has_adapters: bool = False,
        images: ImageTokens | None = None,
    ) -> Tensor:
        """Return logits [R, vocab_size] of the tokens at `rows`.

        token_ids, positions: [T] int64. rows: [R] int64, indices of tokens. has_adapters: whether
        any token of the step uses an adapter. images: the image tokens and their embeddings.
        """
        hidden = self.embed(token_ids, positions)
        if images is not None:
            hidden.index_copy_(0, images.rows, images.embeddings)
        axes = None if images is None else images.positions
        angles = self.rotary(positions if axes is None else axes)
        # After its attention, the last layer drops the rows that need no logits. With adapters it
        # keeps all T rows, because the adapter mask has T rows.
        last_rows = None if has_adapters or len(rows) >= len(hidden) else rows
        output: Tensor | None = None
        computed: Tensor | None = None
        if self.native is not None and not has_adapters:
            computed = self.native(hidden, angles, paged, last_rows)
        if computed is not None:
            hidden = computed
        else:
            for layer in self.layers[:-1]:
                hidden, output = layer(hidden, output, angles, paged)
            hidden, output = self.layers[-1](hidden, output, angles, paged, last_rows)
        _, normed = add_and_norm(hidden, output, self.norm, self.spec.residual_scale)
        return self.logits(normed.index_select(0, rows) if last_rows is None else normed)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first layer, [T, hidden], for ids and positions [T]."""
        hidden = self._look_up(token_ids)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        if self._position_embedding is not None:
            offset = self.spec.family.position_offset
            hidden = hidden + F.embedding(positions + offset, self._position_embedding)
        return hidden

    def _look_up(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of the ids [T].

        Only one rank has the embedding of an id; the other ranks add zeros to the sum.
        """
        if self.group.shard.is_whole:
            return F.embedding(token_ids, self.embedding)
        share = self.group.shard.vocabulary(self.spec.vocab_size)
        foreign = (token_ids < share.start) | (token_ids >= share.stop)
        found = F.embedding((token_ids - share.start).masked_fill(foreign, 0), self.embedding)
        return self.group.sum(found.masked_fill(foreign[:, None], 0))

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits [R, vocab_size] for the final norm's outputs [R, hidden]."""
        logits = self.head(normed)
        if not self.group.shard.is_whole:
            whole = torch.cat(self.group.gather(logits), -1)
            logits = whole[:, : self.spec.vocab_size].contiguous()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class Layer:
    """`x += attention(norm(x)); x += mlp(norm(x))`; families place their norms differently.

    A layer does not add its last output to the residual stream. The next norm (of the next layer,
    or the final one) does, in one kernel. So a layer takes and returns two tensors: `hidden`, the
    residual stream, and `output`, which is still to be added to it.
    """

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
        self.mlp = _load_mlp(loader, spec, index, name)
        self.is_parallel = spec.is_parallel
        self.residual_scale = spec.residual_scale

    def __call__(
        self,
        hidden: Tensor,
        output: Tensor | None,
        angles: AnglesByRope,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
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


class Attention:
    """Self-attention over the KV cache, with rotary embedding and optional q/k norms."""

    def __init__(
        self, loader: Loader, spec: DecoderSpec, index: int, name: str, rotary: Rotary
    ) -> None:
        family, dim = spec.family, spec.head_dim
        self.spec, self.index, self.layer = spec, index, spec.layers[index]
        rope = self.layer.rope
        self.rotary_dim = 0 if rope is None else rotary.width(rope)
        order = None
        if family.rotary == "pairs" and rope is not None:
            order = halves_of_pairs(dim, self.rotary_dim)
        shard = loader.group.shard
        heads = shard.heads(spec.num_heads, spec.num_kv_heads)
        self._sizes = [dim * len(part) for part in (heads.queries, heads.keys, heads.keys)]
        self.qkv = loader.linear(qkv_sources(spec, name, heads, order), spec.hidden_size)
        self.out = loader.linear(
            [Source(f"{name}.{family.out}", spec.hidden_size)],
            spec.num_heads * dim,
            columns=None if shard.is_whole else elements_of(heads.queries, dim),
        )
        self.norms = load_qk_norms(loader, spec, name, heads, order)
        self._norm_both = None
        """Norms query heads and key heads together, as they lie side by side in memory."""
        if spec.qk_norm in ("head", "after rotary") and spec.qkv_clip is None:
            self._norm_both = norm_of_all_heads(self.norms, (len(heads.queries), len(heads.keys)))
        self.sinks = loader.optional(f"{name}.sinks", spec.num_heads)
        if self.sinks is not None:
            self.sinks = self.sinks[heads.queries.start : heads.queries.stop]
        self._rotate = loader.elementwise.rotary

    def __call__(
        self,
        hidden: Tensor,
        angles: AnglesByRope,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [T, hidden], or only its `rows`, [R, hidden]."""
        kind, clip, dim = self.spec.qk_norm, self.spec.qkv_clip, self.spec.head_dim
        merged = self.qkv(hidden)
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
            rotation = Rotation(*angles[self.layer.rope], self.rotary_dim)
        if kind == "after rotary":
            if rotation is not None:
                self._rotate(query, key, *rotation)
                rotation = None
            query, key = self._norm_heads(query, key, merged)
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
        return self.out(attended if rows is None else attended.index_select(0, rows))

    def _norm_heads(self, query: Tensor, key: Tensor, merged: Tensor) -> tuple[Tensor, Tensor]:
        """Norm query and key, [T, heads, head_dim], which are slices of `merged`."""
        if self._norm_both is None:
            return self.norms[0](query), self.norms[1](key)
        both = merged.narrow(-1, 0, sum(self._sizes[:2])).unflatten(-1, (-1, self.spec.head_dim))
        query, key = self._norm_both(both).split_with_sizes((query.shape[1], key.shape[1]), 1)
        return query, key


class MLP:
    """`down(activation(gate(x)) * up(x))`; without a gate, `down(activation(up(x)))`."""

    def __init__(
        self, loader: Loader, spec: DecoderSpec, block: str, width: int | None = None
    ) -> None:
        """block: the MLP's name in the checkpoint. width: intermediate size; None means
        `spec.mlp_width`."""
        family = spec.family
        width, shard = width or spec.mlp_width, loader.group.shard
        columns = None if shard.is_whole else shard.columns(width)
        total = 2 * width if family.is_gated else width
        names = [f"{block}.{name}" for name in family.gate_up]
        order = None
        if columns is not None:
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


class SharedExperts:
    """Experts plus a shared MLP that sees every token, weighted by a sigmoid gate (Qwen2-MoE)."""

    def __init__(self, loader: Loader, spec: DecoderSpec, block: str, names: ExpertNames) -> None:
        config: Any = spec.config
        self._experts = Experts(loader, spec, block, names)
        self._shared = MLP(
            loader, spec, f"{block}.{names.shared}", config.shared_expert_intermediate_size
        )
        gate = [Source(f"{block}.{names.shared}_gate", 1)]
        self._gate = loader.linear(gate, spec.hidden_size, may_quantize=False)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._experts(hidden) + torch.sigmoid(self._gate(hidden)) * self._shared(hidden)


def _load_mlp(
    loader: Loader, spec: DecoderSpec, index: int, name: str
) -> MLP | Experts | SharedExperts:
    """Load the feed-forward block of layer `index`, whose name in the checkpoint is `name`."""
    family = spec.family
    names = family.experts
    if names is None or not spec.layers[index].has_experts:
        return MLP(loader, spec, f"{name}.{family.mlp}" if family.mlp else name)
    kind = SharedExperts if names.shared else Experts
    return kind(loader, spec, f"{name}.{names.block}", names)


def _load_position_embedding(loader: Loader, spec: DecoderSpec) -> Tensor | None:
    """Load the learned position embedding [positions, hidden], if the model has one."""
    family, config = spec.family, spec.config
    if not family.position_embedding:
        return None
    name = f"{family.prefix}{family.position_embedding}.weight"
    length = config.max_position_embeddings + family.position_offset
    return loader.tensor(name, length, spec.hidden_size)
