"""How much memory the host has left."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


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
