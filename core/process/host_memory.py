"""The memory that is still available on the host."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_host_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes this process may still allocate.

    That is the free memory of the machine or, if less, of the container (cgroup v2) around this
    process.
    """
    available = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        # The page cache, such as that of weights just read, counts as used but can be reclaimed.
        used -= _field(cgroup / "memory.stat", "inactive_file")
        available = min(available, max(0, limit - used))
    return available


def _field(path: Path, name: str) -> int:
    """Return the number after `name` at the start of a line; 0 if there is no such line or file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
