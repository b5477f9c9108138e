"""The models that a command line is about, and how it configures them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from container.configuration.environment import sets_model_id
from container.configuration.flags import read_flags
from container.configuration.properties import Setting
from container.configuration.resolve import Configuration, load_configuration
from container.model_files.directory import default_model_dir, find_properties, open_model_dir
from container.multi_model.store import store_entries
from core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class OneModel:
    """A command line about one model."""

    path: Path
    """The model's directory or archive, as given."""
    directory: Path
    configuration: Configuration


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="the model's directory, archive or GGUF file, its id on the Hugging Face hub, or its "
        "s3:// address; like all flags, it overrides the environment and serving.properties",
    )
    parser.add_argument(
        "--properties",
        type=Path,
        metavar="FILE",
        help="configuration file (default: serving.properties in the model directory)",
    )
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="model directory, archive or GGUF file, unless option.model_id is set (default: "
        "/opt/ml/model, else the demo model)",
    )


def chosen_models(parsed: argparse.Namespace) -> OneModel | Mapping[str, Path]:
    """Decide which models `serve` and `explain` are about. The first of these applies:

    1. SAGEMAKER_MULTI_MODEL=true: the models of the directory, if there is one.
    2. MODEL, a flag, the environment or --properties names a model: that model.
    3. The directory holds models, each in an entry of its own: these models.
    4. Otherwise, the directory is the model.

    Only one model can be configured by flags.
    """
    flags = settings_of(parsed)
    is_endpoint = os.environ.get("SAGEMAKER_MULTI_MODEL", "").strip().lower() == "true"
    is_named = (
        parsed.properties is not None
        or sets_model_id(os.environ)
        or any(flag.key == "option.model_id" for flag in flags)
    )
    if is_endpoint and is_named:
        raise ConfigurationError(
            "SAGEMAKER_MULTI_MODEL=true serves the models that POST /models loads, each with its "
            "own serving.properties; do not set HF_MODEL_ID, OPTION_MODEL_ID, MODEL or --properties"
        )
    directory = model_dir_of(parsed) or (None if is_endpoint else default_model_dir())
    models: Mapping[str, Path] = {}
    if directory is not None and not is_named:
        models = store_entries(directory)
    if not (models or is_endpoint):
        return one_model(parsed, flags)
    if flags:
        raise ConfigurationError(
            f"{flags[0].source} works only for one model; with several, set {flags[0].key} in each "
            "model's serving.properties"
        )
    for warning in load_configuration(None, os.environ).warnings:
        print(f"warning: {warning}")
    return models


def one_model(parsed: argparse.Namespace, flags: Sequence[Setting]) -> OneModel:
    path = model_dir_of(parsed) or default_model_dir()
    directory = open_model_dir(path)
    properties = parsed.properties or find_properties(directory)
    return OneModel(path, directory, load_configuration(properties, os.environ, flags))


def settings_of(parsed: argparse.Namespace) -> list[Setting]:
    """Return the settings that the command line makes.

    MODEL sets option.model_id, unless it is a local path and neither --properties nor the
    environment can name another model.
    """
    path, flags = model_dir_of(parsed), read_flags(parsed)
    if parsed.model is None:
        return [*flags]
    if path is None or path == parsed.model_dir:
        return [Setting("option.model_id", parsed.model, "MODEL"), *flags]
    if parsed.properties is None and not sets_model_id(os.environ):
        return [*flags]
    return [Setting("option.model_id", str(path.absolute()), "MODEL"), *flags]


def model_dir_of(parsed: argparse.Namespace) -> Path | None:
    """Return the local model that the command line names, or None if it names none."""
    if parsed.model is not None and Path(parsed.model).expanduser().exists():
        return Path(parsed.model).expanduser()
    return parsed.model_dir
