"""The attention function of transformers' models.

The models are not patched: `paged_attention_forward` is registered with AttentionInterface. The
batch and the KV cache reach it as the keyword `paged` of `model(...)`. No mask function is
registered, so transformers builds no mask and does not synchronize with the device.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from engine.attention.call import AttentionCall, PagedAttention, UnsupportedModelError

ATTENTION_NAME = "longshore_paged"
UNSUPPORTED_KEYWORDS = ("position_bias", "indices", "block_indices")
"""Keywords of attention variants that plain softmax attention would silently ignore."""


def register_attention() -> None:
    """Register ATTENTION_NAME with transformers. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    paged: PagedAttention | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute attention with transformers' signature; return [1, T, heads, dim] and no weights.

    query, key, value: [1, heads, T, dim], after rotary embedding. Raises UnsupportedModelError if
    the model passes an argument that paged attention does not support.
    """
    _check_arguments(attention_mask, paged, keywords)
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


def _check_arguments(
    attention_mask: Tensor | None, paged: PagedAttention | None, keywords: dict[str, Any]
) -> None:
    if paged is None:
        raise UnsupportedModelError("its layers do not pass keywords on to attention")
    if attention_mask is not None:
        raise UnsupportedModelError("it builds an attention mask of its own")
    for name in UNSUPPORTED_KEYWORDS:
        if keywords.get(name) is not None:
            raise UnsupportedModelError(f"its attention takes '{name}'")


def _window_of(module: nn.Module, keywords: dict[str, Any]) -> int | None:
    """Return the layer's sliding window in tokens, or None.

    The keyword is authoritative, even if it is None: exaone4 passes None on full layers while its
    config has a window. Some models (qwen2_moe, phimoe) put the window only into the mask.
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
