"""The C++ kernels, compiled into the user's cache."""

from __future__ import annotations

import pytest

from kernels.cpu.shared_library import unavailable_reason


@pytest.fixture(autouse=True, scope="session")
def _needs_a_compiler():
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
