"""Imports the scripts of packaging/, a folder that is no package: PyPI has one of that name."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.container.processes import ROOT


def load(path: str) -> ModuleType:
    """Import a script, given its path below packaging/."""
    file = ROOT / "packaging" / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
