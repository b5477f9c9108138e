"""The one function through which transformers' models reach our KV memory.

Models stay untouched: the function is registered with AttentionInterface, and what it needs (the
batch's layout and the cache) travels as the typed keyword `paged` through `model(...)`. Because
no mask function is registered beside it, transformers builds no mask and synchronizes nothing.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from core.errors import ConfigurationError

ATTENTION_NAME = "longshore_paged"
UNSUPPORTED_KEYWORDS = ("position_bias", "indices", "block_indices")
"""Keywords of attention variants that a plain softmax over K/V would silently drop."""


class UnsupportedModelError(ConfigurationError):
    """The model cannot run packed; the message is the reason, without the model's name."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention over a flat row of T tokens, after rotary embedding."""

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


class AttendsPaged(Protocol):
    """What travels as the keyword `paged`."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [T, heads, value_dim]."""
        ...


def register_attention() -> None:
    """Makes ATTENTION_NAME known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    paged: AttendsPaged | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: [1, heads, T, dim] each; returns [1, T, heads, dim].

    Raises UnsupportedModelError where the model asks for what paged attention does not compute.
    """
    _refuse_what_would_be_dropped(attention_mask, paged, keywords)
    assert paged is not None
    call = AttentionCall(
        layer=module.layer_idx,  # pyright: ignore[reportArgumentType]
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=_window_of(module, keywords),
        softcap=softcap,
        sinks=s_aux,
    )
    return paged.attend(call)[None], None


def _refuse_what_would_be_dropped(
    attention_mask: Tensor | None, paged: AttendsPaged | None, keywords: dict[str, Any]
) -> None:
    if paged is None:
        raise UnsupportedModelError("its layers do not pass keywords on to attention")
    if attention_mask is not None:
        raise UnsupportedModelError("it builds an attention mask of its own")
    for name in UNSUPPORTED_KEYWORDS:
        if keywords.get(name) is not None:
            raise UnsupportedModelError(f"its attention takes '{name}'")


def _window_of(module: nn.Module, keywords: dict[str, Any]) -> int | None:
    """The layer's sliding window, in tokens.

    A keyword is authoritative, even None (exaone4 passes None on full layers while its config
    has a window). Some models (qwen2_moe, phimoe) put the window into the mask alone.
    """
    if "sliding_window" in keywords:
        return keywords["sliding_window"] or None
    if not _makes_windowed_masks(type(module).__module__):
        return None
    config: Any = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[module.layer_idx] != "sliding_attention":  # pyright: ignore[reportArgumentType]
        return None
    return getattr(config, "sliding_window", None)


@cache
def _makes_windowed_masks(module_name: str) -> bool:
    return "create_sliding_window_causal_mask" in inspect.getsource(sys.modules[module_name])
