"""Where the model's files lie: beside serving.properties, at a path, on S3 or on the hub."""

from __future__ import annotations

import logging
from pathlib import Path

from container.configuration.resolve import Configuration
from container.models.archive import is_archive, unpacked
from container.models.s3 import downloaded
from core.errors import ConfigurationError
from core.hub import from_hub

logger = logging.getLogger(__name__)

SAGEMAKER_MODEL_DIR = Path("/opt/ml/model")
_MODEL_FILES = ("config.json", "serving.properties", "model.py")


def default_model_dir() -> Path:
    """SageMaker's directory in a container; the demo model of the checkout elsewhere."""
    if SAGEMAKER_MODEL_DIR.is_dir():
        return SAGEMAKER_MODEL_DIR
    return Path(__file__).parents[1] / "models" / "demo"


def open_model_dir(path: Path) -> Path:
    """The directory itself: an archive is unpacked, alone in a directory or named as the path.

    A directory that holds nothing but another one stands for that, as in LMI.
    """
    if path.is_file() and is_archive(path.name):
        return open_model_dir(unpacked(path))
    entries = list(path.iterdir()) if path.is_dir() else []
    if len(entries) == 1 and (entries[0].is_dir() or is_archive(entries[0].name)):
        return open_model_dir(entries[0])
    return path


def properties_beside(model_dir: Path) -> Path | None:
    """The configuration that lies in a model's directory, where there is one."""
    path = model_dir / "serving.properties"
    return path if path.is_file() else None


def holds_model(directory: Path) -> bool:
    """Whether anything in it makes it a model: weights, a handler, or a file that names them."""
    return any((directory / name).is_file() for name in _MODEL_FILES)


def resolve_model_dir(configuration: Configuration, model_dir: Path) -> Path:
    """The local directory of the model; downloads what is on S3 or on the Hugging Face hub.

    Raises ConfigurationError where no model is there, with the ways to name one.
    """
    model_id = configuration.options.model_id
    if model_id is None:
        return _require_model(
            model_dir, "put a model there, or name one with option.model_id, HF_MODEL_ID or "
            "--model-dir",
        )  # fmt: skip
    if model_id.startswith("s3://"):
        return _require_model(open_model_dir(downloaded(model_id)), "correct option.model_id")
    local = open_model_dir(named_path(configuration, model_dir))
    if local.is_dir():
        if configuration.options.revision:
            logger.warning("option.revision has no effect on the local model %s", local)
        return _require_model(local.resolve(), "correct option.model_id")
    path = from_hub(model_id, configuration.options, given_as="option.model_id", local=local)
    return _require_model(path, "choose another model or option.revision")


def named_path(configuration: Configuration, model_dir: Path) -> Path:
    """The model directory, or what option.model_id is if it is a path: relative to its file."""
    model_id = configuration.options.model_id
    if model_id is None:
        return model_dir
    beside = configuration.properties_path.parent if configuration.properties_path else Path()
    return beside / Path(model_id).expanduser()


def describe_model(configuration: Configuration, model_dir: Path) -> str:
    """Which model would be served, and what is wrong with it as far as a look shows."""
    path, model_id = named_path(configuration, model_dir), configuration.options.model_id
    if model_id is not None and model_id.startswith("s3://"):
        return f"{model_id} (to be downloaded)"
    path = open_model_dir(path)
    if path.is_dir():
        lacks = "" if (path / "config.json").is_file() else " (no config.json: holds no model)"
        return f"{path.resolve()}{lacks}"
    return f"{model_id} (no directory here)" if model_id else f"{path} (there is no such directory)"


def _require_model(path: Path, cure: str) -> Path:
    if not (path / "config.json").is_file():
        raise ConfigurationError(f"{path} holds no model (config.json is missing): {cure}")
    return path
