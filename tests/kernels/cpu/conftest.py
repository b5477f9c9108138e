"""Fixtures for tests of the C++ kernels, which are compiled into the user's cache."""

from __future__ import annotations

import pytest

from kernels.cpu import shared_library
from kernels.cpu.linear import panel_columns
from kernels.cpu.shared_library import load_library, unavailable_reason


@pytest.fixture(autouse=True, scope="session")
def _needs_a_compiler():
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with `target` for the target of this CPU, and in the matrix for all that it knows.

    Each of them is a library to compile.
    """
    if "target" in metafunc.fixturenames:
        best, *others = shared_library.host_targets() or [None]
        rest = [pytest.param(target, marks=pytest.mark.matrix(cases=0)) for target in others]
        metafunc.parametrize(
            "target", [best, *rest], indirect=True, ids=lambda each: each and each.name
        )


@pytest.fixture
def target(request, monkeypatch):
    """Run with the C++ library for one CPU target."""
    monkeypatch.setattr(shared_library, "host_target", lambda: request.param)
    forget()
    yield request.param
    forget()


def forget():
    load_library.cache_clear()
    panel_columns.cache_clear()
