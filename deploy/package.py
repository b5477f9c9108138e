"""The files of a model, with the serving.properties that it is to be served by."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import javaproperties

from deploy.errors import DeployError

PROPERTIES = "serving.properties"
ARCHIVE = "model.tar.gz"


@dataclass(frozen=True, slots=True)
class Package:
    """What /opt/ml/model is to hold."""

    files: Mapping[str, Path]
    """By their paths below the model's directory; none where the model is only named."""
    properties: str

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values()) + len(self._encoded)

    @property
    def digest(self) -> str:
        """Differs when the contents may: of files it looks at size and time, not inside."""
        found = [self.properties]
        for name, path in sorted(self.files.items()):
            status = path.stat()
            found.append(f"{name} {status.st_size} {status.st_mtime_ns}")
        return hashlib.sha256("\0".join(found).encode()).hexdigest()[:16]

    def blobs(self) -> Mapping[str, Path | bytes]:
        """Everything by its path, the properties as bytes."""
        return {**self.files, PROPERTIES: self._encoded}

    def write_archive(self, path: Path, progress: Callable[[int], object]) -> None:
        """A model.tar.gz with all at its root. `progress` hears of bytes read."""
        # Weights do not compress: the fastest level loses nothing.
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
    """The files of a directory, or none for a model that the container fetches by its id.

    serving.properties is that of `properties`, else the directory's own, with the strategy and the
    id put in. Raises DeployError where there is no model, or two.
    """
    if (model_dir is None) == (model_id is None):
        raise DeployError("name one model: --model-dir DIR, or --model-id ID of the hub")
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
            f"{properties}: option.model_id={settings['option.model_id']} names another model than "
            "--model-dir; leave one of them out"
        )
    if strategy is not None:
        settings["option.batching"] = strategy
    return Package(files, settings.dumps())


def _files(model_dir: Path) -> dict[str, Path]:
    """All but hidden ones, which are caches and checkouts."""
    if not (model_dir / "config.json").is_file():
        raise DeployError(f"--model-dir {model_dir} holds no model (config.json is missing)")
    paths = sorted(each for each in model_dir.rglob("*") if each.is_file())
    names = {path.relative_to(model_dir).as_posix(): path for path in paths}
    return {
        name: path
        for name, path in names.items()
        if not any(part.startswith(".") for part in name.split("/"))
    }


def _read(path: Path | None) -> javaproperties.PropertiesFile:
    """Keeps comments and order. Raises DeployError for a file that cannot be read."""
    if path is None:
        return javaproperties.PropertiesFile()
    try:
        return javaproperties.PropertiesFile.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, javaproperties.InvalidUEscapeError) as error:
        raise DeployError(f"{path}: {error}") from error
