"""DJL's model store: a directory in which every entry is a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from container.model_files.archive import is_archive, strip_archive_suffix
from container.model_files.directory import holds_model, open_model_dir
from core.errors import ConfigurationError


def store_entries(path: Path) -> Mapping[str, Path]:
    """Return the models of a model store by name, or {} if the path is not a store.

    As in DJL, a directory is a store if all its entries, including hidden ones, are directories or
    archives. A directory with a single entry is treated as that model, and a directory in which no
    entry holds a model is not a store. Raises ConfigurationError if only some entries hold a model
    or two have the same name.
    """
    entries = sorted(path.iterdir()) if path.is_dir() else []
    if len(entries) < 2 or not all(entry.is_dir() or is_archive(entry.name) for entry in entries):
        return {}
    without_model = [
        entry for entry in entries if entry.is_dir() and not holds_model(open_model_dir(entry))
    ]
    if len(without_model) == len(entries):
        return {}
    if without_model:
        names = ", ".join(entry.name for entry in without_model)
        raise ConfigurationError(
            f"{path} is a store of several models, because all its entries are directories or "
            f"archives, but {names} holds no model (config.json, serving.properties, model.py): "
            f"remove it or, if {path} is one model, put a serving.properties there"
        )
    models = {strip_archive_suffix(entry.name): entry for entry in entries}
    if len(models) < len(entries):
        raise ConfigurationError(
            f"{path} has two models with the same name: rename a file or directory"
        )
    return models
