"""The arguments of one layer's attention call, and the interface that computes attention."""

from __future__ import annotations

from collections.abc import Callable
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


Expands = Callable[[int, int, int], bool]
"""(new tokens, context length, tokens that its blocks hold) of a sequence -> whether its latents
are expanded."""


class Expansion(Protocol):
    """A step in which the latents of some sequences are expanded to K and V of every head."""

    others: Tensor | None
    """[R] int64: the tokens of all other sequences; None if there are none."""

    def attend(self, call: AttentionCall, expand: Callable[[Tensor], Tensor]) -> Tensor:
        """Write the new latents, then attend over K and V of the expanded sequences.

        call: its queries are those of the heads, [T, heads, dim of K], its keys latents. expand:
        returns K and V, [N, heads, dims of K + dims of V], of rows [N, row] of the cache. Returns
        [T, heads, dims of V], with arbitrary numbers for `others`.
        """
        ...

    def attend_others(self, call: AttentionCall) -> Tensor:
        """Return the attention of `others` over latents. Call it after `attend`.

        call: its queries are only theirs, [R, heads, row].
        """
        ...


class PagedAttention(Protocol):
    """Attention over the KV cache. A decoder gets it as its argument `paged`."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output, [T, heads, value_dim]."""
        ...

    def expansion(self, layer: int, dims: tuple[int, int], expands: Expands) -> Expansion | None:
        """Return the expansion of a layer's latents in this step; None if no sequence is expanded.

        dims: those of K and V of a head, expanded. All layers give the same dims and `expands`.
        """
        ...

    @property
    def states(self) -> States:
        """What layers with a state compute with. Only for a model that has some."""
        ...
