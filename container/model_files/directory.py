"""Locates the model's files: beside serving.properties, at a path, on S3 or on the hub."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from container.configuration.resolve import Configuration
from container.model_files.archive import is_archive, unpack_archive
from container.model_files.gguf import model_directory
from container.model_files.s3 import download_from_s3
from core.configuration.hub import from_hub
from core.configuration.options import ModelOptions, SourceOptions
from core.errors import ConfigurationError
from core.files.gguf import find_gguf, is_gguf

logger = logging.getLogger(__name__)

SAGEMAKER_MODEL_DIR = Path("/opt/ml/model")
_MODEL_FILES = ("config.json", "serving.properties", "model.py")


def default_model_dir() -> Path:
    """Return SageMaker's model directory if it exists, else the demo model of this repository."""
    if SAGEMAKER_MODEL_DIR.is_dir():
        return SAGEMAKER_MODEL_DIR
    return Path(__file__).parents[2] / "models" / "demo"


def open_model_dir(path: Path) -> Path:
    """Return the directory of the model at `path`, which may be a directory or an archive.

    A GGUF file is returned as it is; `model_directory` translates it. If a directory's only entry
    is another directory or an archive, that entry is opened instead, as in LMI.
    """
    if path.is_file() and is_archive(path.name):
        return open_model_dir(unpack_archive(path))
    entries = list(path.iterdir()) if path.is_dir() else []
    if len(entries) == 1 and (entries[0].is_dir() or is_archive(entries[0].name)):
        return open_model_dir(entries[0])
    return path


def find_properties(model_dir: Path) -> Path | None:
    """Return the path of serving.properties in the model directory, or None if there is none."""
    path = model_dir / "serving.properties"
    return path if path.is_file() else None


def holds_model(directory: Path) -> bool:
    """Return whether the directory holds a model, a handler or a serving.properties."""
    return any((directory / name).is_file() for name in _MODEL_FILES) or bool(find_gguf(directory))


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where to look for the model and for the user's files."""

    source: SourceOptions
    model_dir: Path
    """The model directory, opened."""
    properties_path: Path | None
    """The path of serving.properties, if there is one."""

    @property
    def path(self) -> Path:
        """option.model_id as a path, or the model directory if the option is not set.

        A relative path starts at the directory of serving.properties. The path need not exist: if
        option.model_id is an id on the hub, it usually does not.
        """
        if self.source.model_id is None:
            return self.model_dir
        base = self.properties_path.parent if self.properties_path else Path()
        return base / Path(self.source.model_id).expanduser()

    @property
    def folders(self) -> list[Path]:
        """The directories of the user's files: that of serving.properties comes first."""
        return [*([self.properties_path.parent] if self.properties_path else []), self.model_dir]

    def user_file(self, name: str) -> Path | None:
        """Return the file of this name beside serving.properties, else in the model directory."""
        paths = [folder / name for folder in self.folders]
        return next((path for path in paths if path.is_file()), None)


def model_place(configuration: Configuration, model_dir: Path) -> ModelPlace:
    return ModelPlace(configuration.options.source, model_dir, configuration.properties_path)


def resolve_model_dir(place: ModelPlace, model: ModelOptions) -> Path:
    """Return the model's local directory; download the model from S3 or the Hugging Face hub.

    A GGUF file is translated into one.

    Raises ConfigurationError if no model is found. Its message says what to change.
    """
    model_id, revision = place.source.model_id, place.source.revision
    if model_id is None:
        return _require_model(
            place.model_dir, "put a model there, or specify one with option.model_id, HF_MODEL_ID "
            "or --model-dir",
        )  # fmt: skip
    if model_id.startswith("s3://"):
        return _require_model(open_model_dir(download_from_s3(model_id)), "correct option.model_id")
    local = open_model_dir(place.path)
    if local.is_dir() or is_gguf(local):
        if revision:
            logger.warning("option.revision has no effect on the local model %s", local)
        return _require_model(local.absolute(), "correct option.model_id")
    path = from_hub(model_id, revision, model, given_as="option.model_id", local=local)
    return _require_model(path, "choose another model or option.revision")


def describe_model(place: ModelPlace) -> str:
    """Describe the model that would be served, without downloading it."""
    model_id = place.source.model_id
    if model_id is not None and model_id.startswith("s3://"):
        return f"{model_id} (to be downloaded)"
    path = open_model_dir(place.path)
    if path.is_dir() or is_gguf(path):
        has_model = (path / "config.json").is_file() or find_gguf(path)
        problem = "" if has_model else " (no model: config.json is missing)"
        return f"{path.resolve()}{problem}"
    if model_id is None or model_id.startswith(("/", ".", "~")):
        return f"{path} (no such directory)"
    return f"{model_id} (not a local directory)"


def _require_model(path: Path, hint: str) -> Path:
    directory = model_directory(path)
    if not (directory / "config.json").is_file():
        raise ConfigurationError(f"{path} holds no model (config.json is missing): {hint}")
    return directory
