"""The GPUs that a process may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def visible_gpus(variables: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES or, if it is not set, the numbers of all GPUs.

    variables: the environment. devices: the directory of the operating system's device files.
    """
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
        return tuple(sorted(numbers, key=int))
    return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))
