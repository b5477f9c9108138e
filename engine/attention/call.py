"""One layer's attention call, and what answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from core.errors import ConfigurationError


class UnsupportedModelError(ConfigurationError):
    """The model cannot run on the paged KV cache; the message is the reason, without its name."""


class Rotation(NamedTuple):
    """The arguments of `rotary` that follow queries and keys."""

    cos: Tensor
    """[T, rotary_dim], or [T, rotary_dim / 2] if both halves share them."""
    sin: Tensor
    rotary_dim: int
    """How many of a head's first dims are rotated."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention for T tokens of all sequences of a step."""

    layer: int
    query: Tensor
    """[T, heads, head_dim]."""
    key: Tensor
    """[T, kv_heads, head_dim]."""
    value: Tensor
    """[T, kv_heads, value_dim]."""
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    rotation: Rotation | None = None
    """Rotary embedding that the backend has yet to apply to `query` and `key`; None if they are
    final. The backend applies it in place."""


class PagedAttention(Protocol):
    """Attention over the KV cache. A decoder gets it as its argument `paged`."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output, [T, heads, value_dim]."""
        ...
