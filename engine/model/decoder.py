"""The decoder of all supported model families: embedding, layers, final norm, head.

One forward pass computes the T tokens of all sequences of a step as one flat batch, [T, hidden],
without padding. Each layer calls `paged.attend` once, which writes the tokens' keys and values to
the KV cache and attends over the block tables of their sequences. A `Linear` hides how its weight
is stored; `engine.model.families` lists how each family differs from Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from engine.attention.call import PagedAttention
from engine.model.layer import Layer
from engine.model.loader import Loader
from engine.model.norms import add_and_norm
from engine.model.one_call import OneCall
from engine.model.rotary import Rotary, StepAngles
from engine.model.spec import DecoderSpec
from engine.step.column import Applied


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
        loader.shard.check_heads(spec.num_heads, [shape.num_kv_heads for shape in spec.shapes])
        self.shapes = [
            replace(shape, num_kv_heads=len(heads.keys))
            for shape in spec.shapes
            for heads in [loader.shard.heads(spec.num_heads, shape.num_kv_heads)]
        ]
        """This process's part of the KV cache, for each layer of the model with attention."""
        self.states = spec.states
        """What each layer with a state keeps of a sequence."""
        embedding = f"{prefix}{family.embedding}.weight"
        if spec.is_tied and embedding not in loader.checkpoint:
            embedding = f"{family.head}.weight"  # some checkpoints store only the head
        self.embedding = loader.embedding(embedding, spec.vocab_size, width)
        self._look_up = loader.group.look_up(self.embedding, spec.vocab_size)
        self._adjust = _load_adjustment(loader, spec)
        self.rotary = Rotary(spec, loader.device, loader.dtype)
        # None hides the bar unless stderr is a terminal.
        indices = tqdm(range(num_layers), "loading layers", disable=None if show_progress else True)
        self.layers = [self.make_layer(loader, index) for index in indices]
        self.norm = loader.norm(
            f"{prefix}{family.final_norm}", (width,), family.norm, spec.norm_eps
        )
        self.head = loader.head(family.head, spec.vocab_size, self.embedding, is_tied=spec.is_tied)
        self.linears = loader.linears
        self.num_bytes, self.num_weights = loader.num_bytes, loader.num_weights
        self.one_call: OneCall | None = OneCall(self.layers, self.norm)
        """Runs `layers` and `norm` in one call, in the steps that it supports; None: each alone."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        paged: PagedAttention,
        columns: Sequence[Applied] = (),
    ) -> Tensor:
        """Return logits [R, vocab_size] of the tokens at `rows`.

        token_ids, positions: [T] int64. rows: [R] int64, indices of tokens. columns: those that the
        step uses.
        """
        hidden = self.embed(token_ids, positions)
        for column in columns:
            positions = column.embed(hidden, positions)
        angles = self.angles(token_ids, hidden, positions)
        # After its attention, the last layer drops the rows that need no logits.
        between = [column for column in columns if column.adds_to_layers]
        needs_all_rows = bool(between) or any(column.adds_to_linears for column in columns)
        readers = [column for column in columns if column.reads_normed]
        has_all_rows = needs_all_rows or bool(readers) or len(rows) >= len(hidden)
        last_rows = None if has_all_rows else rows
        normed: Tensor | None = None
        if self.one_call is not None and not needs_all_rows:
            normed = self.one_call(hidden, angles, paged, last_rows)
        if normed is None:
            normed = self._layer_by_layer(hidden, angles, paged, last_rows, between)
        for column in readers:
            column.read_normed(normed)
        return self.logits(normed.index_select(0, rows) if last_rows is None else normed)

    def _layer_by_layer(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        last_rows: Tensor | None,
        columns: Sequence[Applied],
    ) -> Tensor:
        """Return the final norm's outputs. last_rows: only these, [R, hidden]."""
        output: Tensor | None = None
        for index, layer in enumerate(self.layers):
            kept = last_rows if index == len(self.layers) - 1 else None
            hidden, output = layer(hidden, output, angles, paged, kept)
            for column in columns:
                column.after_layer(index, hidden, output)
        _, normed = add_and_norm(hidden, output, self.norm, self.spec.residual_scale)
        return normed

    def make_layer(self, loader: Loader, index: int) -> Layer:
        return Layer(loader, self.spec, index, self.rotary)

    def angles(self, token_ids: Tensor, hidden: Tensor, positions: Tensor) -> StepAngles:
        """Return what all layers read of the tokens. hidden: their embeddings, [T, hidden]."""
        return self.rotary(positions)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first layer, [T, hidden], for ids and positions [T]."""
        hidden = self._look_up(token_ids)
        return hidden if self._adjust is None else self._adjust(hidden, positions)

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits [R, vocab_size] for the final norm's outputs [R, hidden]."""
        logits = self.head(normed)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _load_adjustment(
    loader: Loader, spec: DecoderSpec
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return what changes embeddings [T, hidden] of tokens at positions [T]; None: nothing does."""
    table, offset = _load_position_embedding(loader, spec), spec.family.position_offset
    scale = torch.tensor(spec.embedding_scale, dtype=loader.dtype).item()
    if table is None and scale == 1.0:
        return None

    def adjusted(hidden: Tensor, positions: Tensor) -> Tensor:
        if scale != 1.0:
            hidden = hidden * scale
        return hidden if table is None else hidden + F.embedding(positions + offset, table)

    return adjusted


def _load_position_embedding(loader: Loader, spec: DecoderSpec) -> Tensor | None:
    """Load the learned position embedding [positions, hidden], if the model has one."""
    family, config = spec.family, spec.config
    if not family.position_embedding:
        return None
    name = f"{family.prefix}{family.position_embedding}.weight"
    length = config.max_position_embeddings + family.position_offset
    return loader.tensor(name, length, spec.hidden_size)
