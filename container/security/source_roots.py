"""The directories from which requests may load files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from core.configuration.options import ServerOptions
from core.errors import RequestError

SAGEMAKER_ROOT = Path("/opt/ml")
"""SageMaker puts models and all that belongs to them below this directory."""


class SourceRoots:
    """Checks the paths that requests name.

    Symbolic links are followed first, so none leads out of the roots. Whether a path outside them
    exists makes no difference to the error.
    """

    def __init__(self, roots: Iterable[Path] = (SAGEMAKER_ROOT,)) -> None:
        self._roots = tuple(os.path.realpath(root) for root in roots)

    def require(self, source: str, field: str) -> None:
        """Raise RequestError, with this field, unless `source` is below one of the roots."""
        try:
            path = os.path.realpath(source)
        except (OSError, ValueError):  # too many links, or a NUL character
            path = ""
        if not any(Path(path).is_relative_to(root) for root in self._roots):
            raise RequestError(
                field,
                f"{source} is not below {' or '.join(self._roots)}; move it there, or add its "
                "directory to option.source_roots",
            )


def source_roots(server: ServerOptions, own: Iterable[Path]) -> SourceRoots:
    """Return the model's `own` roots and those of `option.source_roots`, by default SageMaker's."""
    if server.source_roots is None:
        return SourceRoots([SAGEMAKER_ROOT, *own])
    # An empty entry, as in `/a:`, would be the working directory.
    given = filter(None, map(str.strip, server.source_roots.split(os.pathsep)))
    return SourceRoots([*map(Path, given), *own])
