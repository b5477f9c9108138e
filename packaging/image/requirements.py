"""Print the server's requirements from pyproject.toml for a device, one per line."""

from __future__ import annotations

import sys
import tomllib
from itertools import chain
from pathlib import Path

EXTRAS = {"cpu": ("aws", "images", "otel"), "cuda": ("aws", "images", "otel", "cuda")}


def main(device: str) -> None:
    """Print the requirements for `device`, cuda or cpu."""
    if device not in EXTRAS:
        sys.exit(f"DEVICE={device}: expected cuda or cpu")
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][name] for name in EXTRAS[device])
    print(*chain(project["dependencies"], *extras), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
