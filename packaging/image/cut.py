"""Remove what a server does not need from the environment, and print the sizes.

It removes libraries' tests, headers and build tools, disassemblers, profilers, and botocore's data
on some 400 AWS services that downloading a model from S3 does not use.
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
    """Clean up the environment of the Python that runs this."""
    (root,) = (Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    for pattern in PATTERNS:
        remove(pattern, root.glob(pattern))
    services = (path for path in (root / "botocore" / "data").iterdir() if path.is_dir())
    remove("botocore/data", (path for path in services if path.name not in AWS_SERVICES))


def remove(label: str, paths: Iterator[Path]) -> None:
    """Delete files and directories, and print their total size with the label."""
    size = 0
    for path in list(paths):
        if path.is_dir():
            size += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            shutil.rmtree(path)
        elif path.exists():
            size += path.stat().st_size
            path.unlink()
    print(f"{size / 2**20:7.1f} MiB  {label}")


if __name__ == "__main__":
    main()
