"""Prints what the server of pyproject.toml needs on a device, one requirement a line."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

CUDA_ONLY = ("triton",)


def main(device: str) -> None:
    """device: cuda or cpu."""
    if device not in ("cuda", "cpu"):
        sys.exit(f"DEVICE={device}: expected cuda or cpu")
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["aws"]]
    print(
        *(each for each in needed if device == "cuda" or not each.startswith(CUDA_ONLY)), sep="\n"
    )


if __name__ == "__main__":
    main(sys.argv[1])
