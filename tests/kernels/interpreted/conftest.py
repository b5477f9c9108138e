"""Repairs the interpreter before this folder's tests define kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.interpreter import repair

    repair()


def pytest_collect_file(file_path: Path) -> None:
    """Refuse a test file that pytest was given by name without the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1" and file_path.name.startswith("test_"):
        raise pytest.UsageError(
            f"{file_path.name} needs TRITON_INTERPRET=1, and a pytest of its own: other tests fail "
            "with it (tests/kernels/conftest.py)"
        )
