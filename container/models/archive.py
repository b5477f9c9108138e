"""Models in one file, such as SageMaker's model.tar.gz."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from container.models.cache import cached
from core.errors import ConfigurationError

_SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")


def is_archive(name: str) -> bool:
    """Whether a file of this name holds a model's files."""
    return name.endswith(_SUFFIXES)


def without_suffix(name: str) -> str:
    """The name of what an archive of this name holds; others stay as they are."""
    suffix = next((each for each in _SUFFIXES if name.endswith(each)), "")
    return name.removesuffix(suffix)


def unpacked(archive: Path) -> Path:
    """The directory of its files. Raises ConfigurationError where it cannot be unpacked."""

    def fill(directory: Path) -> None:
        try:
            _extract(archive, directory)
        except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise ConfigurationError(f"cannot unpack {archive}: {error}") from None

    status = archive.stat()
    return cached(f"{archive.resolve()} {status.st_size} {status.st_mtime_ns}", fill)


def _extract(archive: Path, directory: Path) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            file.extractall(directory)  # leaves out what would lie elsewhere
        return
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")  # refuses what would lie elsewhere
