"""Prints what the server of pyproject.toml needs on a device, one requirement a line."""

from __future__ import annotations

import sys
import tomllib
from itertools import chain
from pathlib import Path

CUDA_ONLY = ("triton",)
EXTRAS = ("aws", "images")


def main(device: str) -> None:
    """device: cuda or cpu."""
    if device not in ("cuda", "cpu"):
        sys.exit(f"DEVICE={device}: expected cuda or cpu")
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][name] for name in EXTRAS)
    for each in chain(project["dependencies"], *extras):
        if device == "cuda" or not each.startswith(CUDA_ONLY):
            print(each)


if __name__ == "__main__":
    main(sys.argv[1])
