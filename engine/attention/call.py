"""The arguments of one layer's attention call, and the interface that computes attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from core.errors import ConfigurationError

if TYPE_CHECKING:
    from engine.attention.states import States


class UnsupportedModelError(ConfigurationError):
    """The model cannot run on the paged KV cache.

    The message is the reason, without the model's name.
    """


class Rotation(NamedTuple):
    """The arguments that `rotary` takes after queries and keys."""

    cos: Tensor
    """[T, rotary_dim], or [T, rotary_dim / 2] if both halves share the values."""
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
    """[T, kv_heads, value_dim], without the dims of V that are also dims of K."""
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    rotation: Rotation | None = None
    """Rotary embedding that the backend must still apply to `query` and `key`, in place. None if
    they need no rotation."""
    is_shared: bool = False
    """Read the K and V that an earlier layer has written. `key` and `value` only have the shapes,
    and need no rotation."""
    shared_dim: int = 0
    """V is `value` and, after it, the first `shared_dim` dims of K."""

    @property
    def value_dim(self) -> int:
        """All dims of V."""
        return self.value.shape[-1] + self.shared_dim


class PagedAttention(Protocol):
    """Attention over the KV cache. A decoder gets it as its argument `paged`."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output, [T, heads, value_dim]."""
        ...

    @property
    def states(self) -> States:
        """What layers with a state compute with. Only for a model that has some."""
        ...
