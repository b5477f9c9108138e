"""Removes from an environment what no server needs, and says how much that was.

Tests of libraries, headers and tools to build against them, disassemblers and profilers, and the
descriptions of the 400 AWS services that fetching a model from S3 does not touch.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

PATTERNS = (
    "**/tests",
    "**/*.a",
    "torch/test",
    "torch/bin/protoc*",
    "torch/bin/test_*",
    "torch/include",
    "torch/share",
    "nvidia/**/include",
    "triton/backends/nvidia/lib/cupti",
    "triton/backends/nvidia/bin/cuobjdump",
    "triton/backends/nvidia/bin/nvdisasm",
)
AWS_SERVICES = ("s3", "sso", "sso-oidc", "sts")


def main() -> None:
    """Run by the environment's own Python."""
    (root,) = (Path(each) for each in sys.path if each.endswith("site-packages"))
    for pattern in PATTERNS:
        remove(pattern, root.glob(pattern))
    services = (each for each in (root / "botocore" / "data").iterdir() if each.is_dir())
    remove("botocore/data", (each for each in services if each.name not in AWS_SERVICES))


def remove(what: str, paths: Iterator[Path]) -> None:
    """Files and directories with all that is in them."""
    size = 0
    for path in list(paths):
        if path.is_dir():
            size += sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            shutil.rmtree(path)
        elif path.exists():
            size += path.stat().st_size
            path.unlink()
    print(f"{size / 2**20:7.1f} MiB  {what}")


if __name__ == "__main__":
    main()
