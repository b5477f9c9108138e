"""How much memory the KV blocks may take."""

from __future__ import annotations

from pathlib import Path

import torch

from core.options import Options
from core.sizing import gpu_kv_budget

GIB = 2**30
MAX_DEFAULT_ON_CPU = 4 * GIB
MAX_DEFAULT_SWAP = 4 * GIB
CGROUP = Path("/sys/fs/cgroup")


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


def available_host_memory() -> int:
    """Bytes this process may still take: of the machine, or of its container if that is less."""
    available = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is not None and used is not None:
        # File cache counts as used, such as of weights just read, but gives way when asked to.
        used -= _field(CGROUP / "memory.stat", "inactive_file")
        available = min(available, max(0, limit - used))
    return available


def _field(path: Path, name: str) -> int:
    """The number after a name at the start of a line; 0 where there is no such line or file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
