"""How much memory the KV blocks may take."""

from __future__ import annotations

from pathlib import Path

import torch

from core.options import Options

GIB = 2**30
MAX_DEFAULT_ON_CPU = 4 * GIB


def kv_budget(options: Options, device: torch.device) -> int:
    """Bytes for KV blocks, after the weights are loaded."""
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * options.gpu_memory_utilization) - (total - free))
    return min(MAX_DEFAULT_ON_CPU, available_host_memory() // 4)


def available_host_memory() -> int:
    """Bytes this process may still take: of the machine, or of its container if that is less."""
    available = _meminfo_bytes("MemAvailable")
    limit, used = (
        _number(Path("/sys/fs/cgroup/memory.max")),
        _number(Path("/sys/fs/cgroup/memory.current")),
    )
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {name}")


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
