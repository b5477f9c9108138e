"""The encoder of all supported families: our own layers inside transformers' model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output

from core.part import Part
from engine.encoder.families import EncoderFamily
from engine.encoder.layer import EncoderLayer, Pass, layer_kinds, load_norm
from engine.encoder.one_call import OneCall
from engine.encoder.texts import PackedTexts
from engine.model.loader import Loader
from engine.staging import Slot
from engine.step.column import PerToken, PerTokenColumn

WITHOUT_EFFECT = {"return_dict", "use_cache"}
"""Arguments of transformers' models that change no hidden state."""


class Encoder:
    """The layers of a transformers model, computed by us for rows without padding.

    The embeddings, the pooler and the head stay transformers' own: they cost little, and differ
    more between families than layers do.
    """

    def __init__(self, base: Any, family: EncoderFamily, loader: Loader) -> None:
        """base: the model without its head. It loses its layers, each when ours has been made, so
        that no more than one is in memory twice. loader: of the tensors of `family.layers`."""
        self._base = base
        modules = base.get_submodule(family.layers)
        self._kinds = layer_kinds(base.config, len(modules))
        self._layers: list[EncoderLayer] = []
        for index, kind in enumerate(self._kinds):
            name = f"{family.layers}.{index}"
            layer = EncoderLayer(loader, family, base.config, modules[index], name, kind)
            self._layers.append(layer)
            modules[index] = nn.Identity()
        base.set_submodule(family.layers, nn.ModuleList())
        self._final_norm = load_norm(loader, base, family.final_norm) if family.final_norm else None
        self._one_call = OneCall(self._layers, self._final_norm)
        self.num_bytes = loader.num_bytes
        """Bytes of the linear layers."""
        self.linears = loader.linears
        self.device = loader.device
        self.columns: list[PerTokenColumn] = []
        """Those in which the layers take part, where a text's parts decide its tokens' numbers."""
        self.carried: Sequence[tuple[Part, ...]] = ()
        """The parts of each text of the batch that is run in `carrying`."""
        self._embeddings: Any = base.get_submodule(family.embeddings)
        self._positions: Any = getattr(self._embeddings, "position_embeddings", None)
        self._has_types = getattr(self._embeddings, "token_type_embeddings", None) is not None
        self._bias = _PositionBias(base, family.position_bias) if family.position_bias else None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        parts: Sequence[tuple[Part, ...]] = (),
        **others: Any,
    ) -> Output:
        """Compute a padded batch, [texts, tokens] each, as transformers' own `forward` does.

        parts: those of each text; empty: those of `carrying`. Hidden states of padding are 0.
        Raises ValueError for arguments that our layers ignore.
        """
        given = {name for name, value in others.items() if value is not None and value is not False}
        if given - WITHOUT_EFFECT:
            raise ValueError(f"our own layers do not take {', '.join(given - WITHOUT_EFFECT)}")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = self._positions_of(input_ids) if position_ids is None else position_ids
        texts = PackedTexts(mask, pads=mask.device.type != "cpu")

        def pack(batch: Tensor) -> Tensor:
            return batch.expand_as(mask).flatten()[texts.index]

        types = pack(token_type_ids) if self._has_types and token_type_ids is not None else None
        columns: list[PerToken] = []
        parts = parts or self.carried
        if any(parts):
            for column in self.columns:
                numbers = torch.tensor([*map(column.number_of, parts)], device=mask.device)
                columns.append(column.of(Slot(pack(numbers[:, None]))))
        hidden = self._rows(texts, pack(input_ids), pack(positions), types, columns)
        padded = hidden.new_zeros(mask.numel(), hidden.shape[1]).index_copy(0, texts.index, hidden)
        padded = padded.view(*mask.shape, -1)
        pooler = getattr(self._base, "pooler", None)
        return Output(padded, None if pooler is None else pooler(padded))  # pyright: ignore[reportArgumentType] - declared as FloatTensor

    @contextmanager
    def carrying(self, parts: Sequence[tuple[Part, ...]]) -> Generator[None]:
        """Let batches have these parts: some of transformers' heads drop arguments of `forward`."""
        self.carried = parts
        try:
            yield
        finally:
            self.carried = ()

    def _rows(
        self,
        texts: PackedTexts,
        ids: Tensor,
        positions: Tensor,
        types: Tensor | None,
        columns: Sequence[PerToken],
    ) -> Tensor:
        """Return the last hidden states [T, hidden] of the texts' tokens, [T] each.

        columns: those that the texts use.
        """
        extra = {} if types is None else {"token_type_ids": types[None]}
        if self._positions is not None:
            extra["position_ids"] = positions[None]
        hidden: Tensor = self._embeddings(ids[None], **extra)[0]
        bias = None if self._bias is None else self._bias(hidden[: texts.longest])
        step = Pass(texts, self._angles(hidden, positions), bias)
        if not any(column.adds_to_linears for column in columns):
            normed = self._one_call(hidden, step)
            if normed is not None:
                return normed
        for column in columns:
            column.begin()
        try:
            for layer in self._layers:
                hidden = layer(hidden, step)
        finally:
            for column in columns:
                column.end()
        return hidden if self._final_norm is None else self._final_norm(hidden)

    def _angles(self, hidden: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `Pass.angles`."""
        rotary: Any = getattr(self._base, "rotary_emb", None)
        if rotary is None:
            return {}
        is_by_kind = hasattr(rotary, "layer_types")  # ModernBERT's
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for kind in dict.fromkeys(self._kinds):
            cos, sin = rotary(hidden[None], positions[None], *([kind] if is_by_kind else []))
            found[kind] = cos[0], sin[0]
        return found

    def _positions_of(self, ids: Tensor) -> Tensor:
        """Return the positions of a padded batch, [texts, tokens] or [1, tokens]."""
        padding: int | None = getattr(self._positions, "padding_idx", None)
        if padding is None:
            return torch.arange(ids.shape[1], device=ids.device)[None]
        is_text = ids != padding  # RoBERTa counts positions from that of padding
        return is_text.cumsum(1) * is_text + padding


class _PositionBias:
    """MPNet's bias of scores by the distance of two tokens, kept for the longest text so far."""

    def __init__(self, base: Any, module: str) -> None:
        self._module: Any = base.get_submodule(module)
        self._bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [heads, L, L], where L is the number of rows [tokens, hidden], or more."""
        bias = self._bias
        if bias is None or bias.shape[-1] < len(rows):
            bias = self._bias = self._module.compute_position_bias(rows[None])[0]
        return bias
