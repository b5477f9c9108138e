"""Options of the test suite."""

from __future__ import annotations

import gc

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite-golden`."""
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/container/golden anew"
    )


def pytest_collection_finish() -> None:
    """Whatever the modules hold stays: collections need not look at torch's objects each time."""
    gc.collect()
    gc.freeze()
