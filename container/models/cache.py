"""Directories of models that had to be fetched or unpacked: filled once, then complete."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from core.errors import ConfigurationError


def cached(key: str, fill: Callable[[Path], None]) -> Path:
    """The directory for `key`, which tells contents apart; `fill` makes it where it is missing.

    It lies below TMPDIR, since SageMaker's own directory for models is read-only. Whoever sees it
    sees it whole: it gets its name when it is filled.
    """
    path = _root() / hashlib.sha256(key.encode()).hexdigest()[:32]
    if path.is_dir():
        return path
    filling = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        fill(filling)
        filling.rename(path)
    except FileExistsError:
        return path  # another process was quicker
    finally:
        shutil.rmtree(filling, ignore_errors=True)
    return path


def _root() -> Path:
    path = Path(tempfile.gettempdir()) / f"longshore-models-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{path} is somebody else's; set TMPDIR to another directory")
    return path
