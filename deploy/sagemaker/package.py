"""Collect the files of a model and its serving.properties for upload."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import javaproperties

from deploy.sagemaker.errors import DeployError

PROPERTIES = "serving.properties"
ARCHIVE = "model.tar.gz"


@dataclass(frozen=True, slots=True)
class Package:
    """The contents of /opt/ml/model."""

    files: Mapping[str, Path]
    """Files by path relative to the model directory; empty if the container downloads the model."""
    properties: str

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values()) + len(self._encoded)

    @property
    def digest(self) -> str:
        """Return a digest of the properties and of each file's name, size and modification time."""
        parts = [self.properties]
        for name, path in sorted(self.files.items()):
            status = path.stat()
            parts.append(f"{name} {status.st_size} {status.st_mtime_ns}")
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def blobs(self) -> Mapping[str, Path | bytes]:
        """Return all contents by path; the properties are bytes."""
        return {**self.files, PROPERTIES: self._encoded}

    def write_archive(self, path: Path, progress: Callable[[int], object]) -> None:
        """Write a model.tar.gz with the contents at its root.

        Calls `progress` with the size of each file after adding it.
        """
        # Weights barely compress at any level, so the fastest one makes the archive hardly larger.
        with tarfile.open(path, "w:gz", compresslevel=1) as archive:
            for name, blob in self.blobs().items():
                member = tarfile.TarInfo(name)
                member.size = blob_size(blob)
                with open_blob(blob) as file:
                    archive.addfile(member, file)
                progress(member.size)

    @property
    def _encoded(self) -> bytes:
        return self.properties.encode()


def blob_size(blob: Path | bytes) -> int:
    return len(blob) if isinstance(blob, bytes) else blob.stat().st_size


def open_blob(blob: Path | bytes) -> BinaryIO:
    return BytesIO(blob) if isinstance(blob, bytes) else blob.open("rb")


def make_package(
    *,
    model_dir: Path | None,
    model_id: str | None,
    properties: Path | None,
    strategy: str | None,
) -> Package:
    """Package the files of `model_dir`, or no files if the container downloads `model_id`.

    The package's serving.properties is `properties`, or else the one in `model_dir`, with the
    strategy and the model id added. Raises DeployError unless exactly one model is named.
    """
    if (model_dir is None) == (model_id is None):
        raise DeployError(
            "name exactly one model: --model-dir DIR, or --model-id with a Hugging Face id"
        )
    files: dict[str, Path] = {}
    if model_dir is not None:
        files = _files(model_dir)
        properties = properties or files.get(PROPERTIES)
        files.pop(PROPERTIES, None)
    settings = _read(properties)
    if model_id is not None:
        settings["option.model_id"] = model_id
    elif settings.get("option.model_id"):
        raise DeployError(
            f"{properties}: option.model_id={settings['option.model_id']} names a different model "
            "than --model-dir; remove one of them"
        )
    if strategy is not None:
        settings["option.batching"] = strategy
    return Package(files, settings.dumps())


def _files(model_dir: Path) -> dict[str, Path]:
    """Return the files below `model_dir`, except hidden ones (caches and checkouts)."""
    if not (model_dir / "config.json").is_file():
        raise DeployError(f"--model-dir {model_dir} has no model (config.json is missing)")
    paths = sorted(path for path in model_dir.rglob("*") if path.is_file())
    names = {path.relative_to(model_dir).as_posix(): path for path in paths}
    return {
        name: path
        for name, path in names.items()
        if not any(part.startswith(".") for part in name.split("/"))
    }


def _read(path: Path | None) -> javaproperties.PropertiesFile:
    """Read a properties file, keeping comments and order. Raises DeployError if that fails."""
    if path is None:
        return javaproperties.PropertiesFile()
    try:
        return javaproperties.PropertiesFile.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, javaproperties.InvalidUEscapeError) as error:
        raise DeployError(f"{path}: {error}") from error
