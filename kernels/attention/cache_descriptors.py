"""Tensor descriptors of K and V, by which TMA, the copy unit of sm_90, loads whole blocks.

One thread asks for a tile, and hardware computes the addresses. Without TMA, all threads compute
addresses. NOTE: Triton encodes the descriptors for the GPU in every launch, which takes host time;
in a CUDA graph it does so only once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.arguments import check_strides
from kernels.configurations import current_arch

DTYPES = (torch.float16, torch.bfloat16)


class CacheDescriptors(NamedTuple):
    """The descriptors of a layer's K and V. One load reads a box: one block of one head."""

    keys: TensorDescriptor
    values: TensorDescriptor


def describe_caches(key_cache: Tensor, value_cache: Tensor) -> CacheDescriptors:
    """Describe K and V, each [blocks, block_size, kv_heads, head_dim] in fp16 or bf16.

    Once per layer is enough: a description stays valid as long as its cache exists. Raises
    ValueError if TMA cannot load from these caches.
    """
    return CacheDescriptors(_describe(key_cache), _describe(value_cache))


def _describe(cache: Tensor) -> TensorDescriptor:
    if cache.dtype not in DTYPES:
        raise ValueError(f"a cache in {cache.dtype} has no descriptor; it must be fp16 or bf16")
    check_strides("the cache", cache)
    if cache.data_ptr() % 16:
        raise ValueError(f"the cache begins at {cache.data_ptr():#x}, not at a multiple of 16")
    by_head = cache.transpose(1, 2)
    box = [1, 1, cache.shape[1], triton.next_power_of_2(cache.shape[3])]
    return TensorDescriptor(cache, list(by_head.shape), list(by_head.stride()), box)


def check_descriptors(
    descriptors: CacheDescriptors,
    key_cache: Tensor,
    value_cache: Tensor,
    tile_keys: int,
    window: int | None,
) -> None:
    """Raise ValueError if these descriptors cannot load tiles of `tile_keys` keys of these caches.

    tile_keys, window: those of the call of paged_prefill. The current GPU must have TMA.
    """
    if descriptors.keys.base is not key_cache or descriptors.values.base is not value_cache:
        raise ValueError("the descriptors are of other caches: call describe_caches with these")
    if key_cache.shape[1] != tile_keys:
        raise ValueError(
            f"the descriptors load blocks of {key_cache.shape[1]} tokens, but tiles have "
            f"{tile_keys} keys; a tile must be a block"
        )
    if window is not None:
        raise ValueError(
            f"descriptors cannot be used with a window of {window}: any tile may then need a mask, "
            "and loads by descriptor have none"
        )
    if 0 < (arch := current_arch()) < 90:
        raise ValueError(f"descriptors need TMA, which sm_{arch} does not have")


@triton.jit
def load_block(descriptor, block, kv_head, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load K or V of one block and head, [BLOCK_N, BLOCK_D]; dims past the head's are zero."""
    return tl.reshape(descriptor.load([block, kv_head, 0, 0]), (BLOCK_N, BLOCK_D))
