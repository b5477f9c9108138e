"""Settings of the test suite, and a fixture for Unix sockets."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

collect_ignore = ["browser", "conformance"]
"""Suites with environments of their own: `make page-test` and `make conformance`."""

settings.register_profile("tests", derandomize=True, deadline=None)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --rewrite-golden."""
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/container/golden anew"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker is left with them when the others are done."""
    items.sort(key=lambda item: item.path.name != "test_interpreted.py")


def pytest_collection_finish() -> None:
    """Freeze the objects of imported modules, so that garbage collections skip torch's objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory for Unix sockets, whose paths must be short; `tmp_path` is too long."""
    with tempfile.TemporaryDirectory(prefix="ls-") as path:
        yield Path(path)
