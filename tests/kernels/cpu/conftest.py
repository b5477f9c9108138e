"""Fixtures for tests of the C++ kernels, which are compiled into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.cpu import shared_library
from kernels.cpu.linear import panel_columns
from kernels.cpu.shared_library import TARGETS, load_library, unavailable_reason


@pytest.fixture(autouse=True, scope="session")
def _needs_a_compiler():
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=TARGETS, ids=lambda target: target.name)
def target(request, monkeypatch):
    """Run with the C++ library for one CPU target."""
    if not request.param.features <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("this CPU lacks features of the target")
    monkeypatch.setattr(shared_library, "host_target", lambda: request.param)
    forget()
    yield request.param
    forget()


def forget():
    load_library.cache_clear()
    panel_columns.cache_clear()
