"""How much memory the KV blocks may take."""

from __future__ import annotations

import torch

from core.host_memory import available_host_memory
from core.options import Options
from core.sizing import gpu_kv_budget

GIB = 2**30
MAX_DEFAULT_ON_CPU = 4 * GIB
MAX_DEFAULT_SWAP = 4 * GIB


def kv_budget(options: Options, device: torch.device, activation_bytes: int = 0) -> int:
    """Bytes for KV blocks, after the weights are loaded; activation_bytes: kept free for steps."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return gpu_kv_budget(options, total, total - free, activation_bytes)
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    return min(MAX_DEFAULT_ON_CPU, available_host_memory() // 4)


def swap_budget(options: Options) -> int:
    """Bytes of host memory for swapped blocks."""
    if options.swap_space_gib is not None:
        return int(options.swap_space_gib * GIB)
    return min(MAX_DEFAULT_SWAP, available_host_memory() // 4)
