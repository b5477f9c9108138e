"""The full names of our modules.

In the repository, our packages are top-level packages. A wheel has them below `longshore`
(docs/design.md, «Names»). Code that needs a module's name as a string asks here.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PREFIX = __name__.removesuffix("core.process.names")
"""Empty in the repository, `longshore.` in a wheel."""


def full_name(module: str) -> str:
    """Return the name under which to import a module, such as `engine.offline.llm`."""
    return f"{_PREFIX}{module}"


def import_root() -> Path:
    """Return the folder from which our modules are imported: a child's PYTHONPATH needs it."""
    return Path(__file__).resolve().parents[__name__.count(".")]


def python_command(module: str) -> tuple[str, str, str]:
    """Return the command that runs a module in a new process."""
    return (sys.executable, "-m", full_name(module))
