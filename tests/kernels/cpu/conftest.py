"""The C++ kernels, compiled into the cache of whoever runs the tests."""

from __future__ import annotations

import pytest

from kernels.cpu.library import what_is_lacking


@pytest.fixture(autouse=True, scope="session")
def _needs_a_compiler():
    reason = what_is_lacking()
    if reason is not None:
        pytest.skip(reason)
