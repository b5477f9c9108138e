"""Models in an archive, such as SageMaker's model.tar.gz."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from core.errors import ConfigurationError
from core.files.cached_directory import cached_directory

_SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")


def is_archive(name: str) -> bool:
    """Return whether the file name has the suffix of an archive."""
    return name.endswith(_SUFFIXES)


def strip_archive_suffix(name: str) -> str:
    """Return the name without the suffix of an archive, if it has one."""
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def unpack_archive(archive: Path) -> Path:
    """Unpack an archive, unless it is already unpacked, and return the directory of its files.

    Raises ConfigurationError if it cannot be unpacked.
    """

    def fill(directory: Path) -> None:
        try:
            _extract(archive, directory)
        except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise ConfigurationError(f"cannot unpack {archive}: {error}") from None

    status = archive.stat()
    return cached_directory(f"{archive.resolve()} {status.st_size} {status.st_mtime_ns}", fill)


def _extract(archive: Path, directory: Path) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            file.extractall(directory)  # strips ".." and leading slashes
        return
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")  # rejects paths outside the directory
