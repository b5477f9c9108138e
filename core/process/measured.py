"""What was measured at an earlier start, in files that the engine writes and `explain` shows.

They lie in the user's cache directory. Where nothing can be written, each start measures anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec


class Measured(msgspec.Struct, frozen=True):
    model: str
    """The model's directory."""
    note: str
    """What was found, for people."""
    values: msgspec.Raw
    """JSON, for whoever wrote it."""
    table: tuple[str, ...] = ()
    """The numbers, for people who want to see them all."""


def folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "longshore" / "measured"


def path_of(key: str, suffix: str = ".json") -> Path:
    """Return the file of what was measured under a key, which names all that it depends on."""
    return folder() / f"{key}{suffix}"


def read(key: str) -> Measured | None:
    return _read(path_of(key))


def write(key: str, measured: Measured) -> None:
    """Keep what was measured, if it can be written."""
    keep(path_of(key), msgspec.json.encode(measured))


def keep(path: Path, content: bytes) -> None:
    """Write a file in this folder, if possible. Others never see half of it."""
    part = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.rename(path)


def lines_on(model_dir: Path) -> Iterator[str]:
    """Yield when and what was measured of a model, and the file of each, in the order of keys."""
    for path in sorted(folder().glob("*.json")):
        measured = _read(path)
        if measured is not None and Path(measured.model).resolve() == model_dir.resolve():
            when = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
            yield f"measured on {when:%Y-%m-%d at %H:%M %Z}: {measured.note}"
            yield from (f"  {row}" for row in measured.table)
            yield f"  kept in {path}"


def _read(path: Path) -> Measured | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError):
        return None
