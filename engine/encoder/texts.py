"""The texts of a forward pass as rows without padding, and attention within each text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.batch import PagedBatch

WINDOW_QUERIES = 256
"""Tokens whose windows one call of attention computes. It also reads the windows' other tokens."""

ALL = 2**40
"""More tokens than a text has."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The tokens of its text that a token of a layer attends to."""

    window: int | None = None
    """The largest distance of such a token; None: no limit."""
    is_causal: bool = False
    """Whether they precede it."""

    @property
    def before(self) -> int | None:
        """The most of them up to itself; None: no limit."""
        return None if self.window is None else self.window + 1

    @property
    def after(self) -> int:
        """The most of them behind it."""
        if self.is_causal:
            return 0
        return ALL if self.window is None else self.window


@dataclass(frozen=True, slots=True)
class _Group:
    """Texts that lie side by side and that one call of attention computes."""

    rows: slice
    num_texts: int
    length: int
    """Tokens of the longest text."""
    places: Tensor | None = None
    """[rows] int64: where each row is if all texts are padded to `length`; None: none is shorter.
    """


class PackedTexts:
    """Which tokens of a padded batch belong to texts, and which rows belong together.

    Rows are sorted by the length of their text. On a CPU, one call computes the attention of all
    texts of one length, without copying them. On other devices, where a launch costs more than some
    padding, one call computes that of all texts, padded for this call only.
    """

    def __init__(self, mask: Tensor, *, pads: bool) -> None:
        """mask: [texts, tokens], 1 for the tokens of texts and 0 for padding. pads: as on a GPU."""
        counts = mask.sum(1)
        order = counts.argsort(stable=True)
        places = torch.arange(mask.numel(), device=mask.device).view_as(mask)
        self.index = places[order][mask[order].bool()]
        """[T] int64: the place of each row in the flattened batch."""
        lengths: list[int] = counts[order].tolist()
        self.lengths, self.longest = lengths, lengths[-1]
        if pads:
            is_text = torch.arange(self.longest, device=mask.device) < counts[order][:, None]
            inside = is_text.flatten().nonzero().flatten()
            self._groups = [_Group(slice(None), len(lengths), self.longest, inside)]
        else:
            self._groups = _groups_of_equal_lengths(lengths)

    def as_batch(self) -> PagedBatch:
        """Return the texts as sequences of a paged cache on the CPU, whose blocks are the rows."""
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        tables = starts[:-1, None] + torch.arange(self.longest, dtype=torch.int32)
        return PagedBatch(starts, lengths, tables, slot_mapping=tables[:0, 0].long(), spans=None)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sight: Sight, bias: Tensor | None = None
    ) -> Tensor:
        """Return the attention of each row over the rows of its text, [T, heads, head_dim].

        query: [T, heads, head_dim]. key, value: [T, kv_heads, head_dim]. bias: [heads, L, L], added
        to the scores of each text; L is at least `longest`.
        """
        parts = [_attend(group, (query, key, value), sight, bias) for group in self._groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _groups_of_equal_lengths(lengths: list[int]) -> list[_Group]:
    groups: list[_Group] = []
    start = 0
    for length, texts in groupby(filter(None, lengths)):
        num_texts = len(list(texts))
        rows = slice(start, start + num_texts * length)
        groups.append(_Group(rows, num_texts, length))
        start = rows.stop
    return groups


def _attend(
    group: _Group, parts: tuple[Tensor, Tensor, Tensor], sight: Sight, bias: Tensor | None
) -> Tensor:
    places, length = group.places, group.length
    mask = None if bias is None else bias[None, :, :length, :length]
    rows = [part[group.rows] for part in parts]
    if places is not None:
        rows = [_padded(part, places, group) for part in rows]
        if not sight.is_causal:  # else no text sees the padding behind it
            hidden = rows[0].new_full((group.num_texts * length,), -torch.inf)
            is_text = hidden.index_fill(0, places, 0.0).view(group.num_texts, 1, 1, length)
            mask = is_text if mask is None else mask + is_text
    shape = (group.num_texts, length)
    query, key, value = (part.unflatten(0, shape).transpose(1, 2) for part in rows)
    if sight.window is not None and sight.window < length - 1:
        attended = _attend_window(query, key, value, mask, sight.window, sight.is_causal)
    else:
        attended = _sdpa(query, key, value, mask, is_causal=sight.is_causal)
    attended = attended.transpose(1, 2).flatten(0, 1)
    return attended if places is None else attended.index_select(0, places)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False
) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped
    )


def _attend_window(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int, is_causal: bool
) -> Tensor:
    """Return `_sdpa` over tokens whose distance is at most `window`, [texts, heads, L, head_dim].

    is_causal: and that are not behind the query.

    mask: [texts, 1, 1, L].
    """
    length = query.shape[2]
    positions = torch.arange(length, device=query.device)
    attended: list[Tensor] = []
    for start in range(0, length, WINDOW_QUERIES):
        queries = slice(start, start + WINDOW_QUERIES)
        keys = slice(max(0, start - window), start + WINDOW_QUERIES + window)
        distances = positions[queries, None] - positions[keys]
        is_far = distances.abs() > window
        if is_causal:
            is_far |= distances < 0
        near = query.new_zeros(is_far.shape).masked_fill(is_far, -torch.inf)[None, None]
        visible = near if mask is None else near + mask[..., keys]
        attended.append(_sdpa(query[:, :, queries], key[:, :, keys], value[:, :, keys], visible))
    return torch.cat(attended, 2)


def _padded(rows: Tensor, places: Tensor, group: _Group) -> Tensor:
    padded = rows.new_zeros(group.num_texts * group.length, *rows.shape[1:])
    return padded.index_copy(0, places, rows)
