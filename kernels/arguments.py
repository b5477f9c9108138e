"""Checks of the arguments of wrappers, and the factors of attention scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.launch_plan import planned

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
LATENT_DIMS = ((576, 512), (320, 256))
"""Dims of K and V where V is the first dims of K's row: DeepSeek's, and Mistral Small 4's."""
EXPANDED_DIMS = ((192, 128),)
"""Other dims of separate K and V: those that DeepSeek's latents expand to, for prefills over caches
of the query's dtype."""
BLOCK_SIZES = (16, 32, 64)
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.uint8)


@planned
def check_paged_arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    sinks: Tensor | None,
    out: Tensor | None,
    is_prefill: bool = False,
) -> None:
    """Raise ValueError for unsupported arguments, with a message that says what is supported.

    Does not read the contents of tensors.
    """
    _check_shapes(query, key_cache, value_cache, is_prefill)
    _check_dtypes(query, key_cache, value_cache)
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        check_strides(name, tensor)
    if key_cache.stride() != value_cache.stride():
        raise ValueError(
            f"key_cache has strides {key_cache.stride()} and value_cache {value_cache.stride()}; "
            "allocate them alike"
        )
    for name, tensor in (("block_tables", block_tables), ("context_lens", context_lens)):
        check_integers(name, tensor)
    if out is not None:
        check_strides("out", out)
        if out.shape != (*query.shape[:2], value_cache.shape[3]) or out.dtype != query.dtype:
            raise ValueError(
                f"out is {list(out.shape)} {out.dtype}; it must be like the query, with V's dim"
            )
    if sinks is not None and (sinks.shape != (query.shape[1],) or not sinks.is_contiguous()):
        raise ValueError(
            f"sinks are {list(sinks.shape)} with strides {sinks.stride()}; they must be "
            f"[{query.shape[1]}], one number per head, and contiguous"
        )


def separate_values(key_cache: Tensor, value_cache: Tensor) -> Tensor | None:
    """Return the V that kernels read besides K: None if rows are latents, in which V lies in K.

    Raises ValueError if dims are those of latents, but V is no view of K's first dims.
    """
    if (key_cache.shape[3], value_cache.shape[3]) not in LATENT_DIMS:
        return value_cache
    if key_cache.data_ptr() != value_cache.data_ptr():
        raise ValueError("a value_cache of fewer dims must be a view of key_cache's first dims")
    return None


def check_strides(name: str, tensor: Tensor) -> None:
    if not is_aligned(tensor):
        raise ValueError(
            f"{name} has strides {tensor.stride()}; the last must be 1 and the others multiples "
            "of 16 elements: make it contiguous"
        )


@planned
def is_aligned(tensor: Tensor) -> bool:
    """Return whether rows begin at multiples of 16 elements.

    Kernels that do not know that their rows are aligned read them 2 bytes at a time.
    """
    starts = (stride(tensor, dim) for dim in range(tensor.ndim - 1))
    return tensor.stride(-1) == 1 and all(start % 16 == 0 for start in starts)


def check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} is {tensor.dtype} with strides {tensor.stride()}; it must be contiguous "
            "int32 or int64"
        )


@planned
def score_factors(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Return `score_scale` and `cap` of `kernels.attention.attention_tile.softmax_step`.

    Both include the factor log2(e), as the kernels compute powers of 2.
    """
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    log2_e = math.log2(math.e)
    if softcap is None:
        return scale * log2_e, None
    return 2 * scale / softcap * log2_e, softcap * log2_e


def stride(tensor: Tensor, dim: int) -> int:
    """Return a stride in elements; 0 for a dimension of size 1, whose stride torch leaves open."""
    return tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def has_kernel(key_dim: int, value_dim: int) -> bool:
    """Return whether the attention kernels take these dims. Fewer for V: it is a part of K."""
    return (key_dim == value_dim and key_dim in HEAD_DIMS) or (key_dim, value_dim) in LATENT_DIMS


def _check_shapes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, is_prefill: bool
) -> None:
    if query.ndim != 3 or key_cache.ndim != 4 or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"query {list(query.shape)}, caches {list(key_cache.shape)} and "
            f"{list(value_cache.shape)}; the query must be [tokens, heads, dim] and both caches "
            "[blocks, block_size, kv_heads, dim]"
        )
    _, block_size, num_kv_heads, key_dim = key_cache.shape
    value_dim = value_cache.shape[3]
    is_expanded = (key_dim, value_dim) in EXPANDED_DIMS and query.dtype == key_cache.dtype
    is_supported = has_kernel(key_dim, value_dim) or (is_prefill and is_expanded)
    if query.shape[2] != key_dim or not is_supported:
        raise ValueError(
            f"head dims of the query, K and V are {query.shape[2]}, {key_dim} and {value_dim}; "
            f"they must be equal and one of {HEAD_DIMS}, or V a part of K's rows, with dims "
            f"{LATENT_DIMS}, or {EXPANDED_DIMS} in prefills over caches of the query's dtype; "
            "kernels.attention.sdpa takes any head dims"
        )
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size}; it must be one of {BLOCK_SIZES}")
    if query.shape[1] % num_kv_heads:
        raise ValueError(
            f"{query.shape[1]} query heads cannot be divided evenly among {num_kv_heads} KV heads"
        )


def _check_dtypes(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    fp8_dtypes = () if query.dtype == torch.float32 else FP8_DTYPES
    if (
        query.dtype not in QUERY_DTYPES
        or key_cache.dtype != value_cache.dtype
        or key_cache.dtype not in (query.dtype, *fp8_dtypes)
    ):
        raise ValueError(
            f"query {query.dtype}, caches {key_cache.dtype} and {value_cache.dtype}; the query "
            "must be fp16, bf16 or fp32; both caches must have its dtype or, unless it is fp32, "
            "be fp8 e4m3"
        )
