"""Names and the version of our modules."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from core.process import names


def test_a_clone_that_is_not_installed_has_a_version_too(monkeypatch):
    assert names.own_version() == version("longshore")

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(names, "version", missing)
    assert names.own_version() == "not installed"
