"""Options of the test suite."""

from __future__ import annotations

import gc

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Whether --rewrite-golden was given."""
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/container/golden anew"
    )


def pytest_collection_finish() -> None:
    """Freeze the objects of imported modules, so that garbage collections skip torch's objects."""
    gc.collect()
    gc.freeze()
