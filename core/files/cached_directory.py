"""Caches downloaded and unpacked files in directories below TMPDIR."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from core.errors import ConfigurationError


def cached_directory(key: str, fill: Callable[[Path], None]) -> Path:
    """Return the directory for `key`, which identifies its contents. If it is missing, `fill` it.

    The directory lies below TMPDIR because SageMaker's model directory is read-only. It is filled
    under a temporary name and then renamed, so other processes never see it incomplete.
    """
    path = _root() / hashlib.sha256(key.encode()).hexdigest()[:32]
    if path.is_dir():
        return path
    partial = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        fill(partial)
        try:
            partial.rename(path)
        except OSError:
            if not path.is_dir():
                raise
            # Another process was faster.
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _root() -> Path:
    path = Path(tempfile.gettempdir()) / f"longshore-models-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{path} belongs to another user; set TMPDIR to another directory")
    return path
