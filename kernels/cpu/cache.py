"""Writes new keys and values to their slots of the KV cache."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kernels.cpu.calls import Kernel, function, run


class Write(ctypes.Structure):
    """Mirrors `struct Write` in elementwise.cpp."""

    _fields_ = (
        ("rows", ctypes.c_void_p * 2),
        ("caches", ctypes.c_void_p * 2),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "block_size")),
        ("dims", ctypes.c_int64 * 2),
        ("strides", ctypes.c_int64 * 2 * 2),
        ("cache_strides", ctypes.c_int64 * 3 * 2),
    )


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Same as `kernels.cache.torch_cache.write_kv`, for rows and caches that are all fp32 or all
    bf16.

    slot_mapping: int64.
    """
    kernel = write(key, value, key_cache, value_cache)
    kernel.arguments.slots = slot_mapping.data_ptr()
    run(kernel, key.numel())


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> Kernel[Write]:
    """Return the kernel that computes `write_kv` once its slots are set."""
    tensors = (key, value, key_cache, value_cache)
    arguments = Write(
        rows=(key.data_ptr(), value.data_ptr()),
        caches=(key_cache.data_ptr(), value_cache.data_ptr()),
        num_tokens=key.shape[0],
        num_heads=key.shape[1],
        block_size=key_cache.shape[1],
        dims=(key.shape[2], value.shape[2]),
        strides=(key.stride()[:2], value.stride()[:2]),
        cache_strides=(key_cache.stride()[:3], value_cache.stride()[:3]),
    )
    return Kernel(function("write_kv", key.dtype), arguments, tensors)
