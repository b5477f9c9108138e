"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite-golden`."""
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/container/golden anew"
    )
