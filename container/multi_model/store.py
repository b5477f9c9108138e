"""DJL's model store: a directory in which every entry is a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from container.models.archive import is_archive, without_suffix
from container.models.directory import holds_model, open_model_dir
from core.errors import ConfigurationError


def store_entries(path: Path) -> Mapping[str, Path]:
    """The models of a store by their names; none where the path itself is the model.

    As in DJL, a directory is a store where every entry, hidden ones too, is a directory or an
    archive. One entry alone is the model itself, which for its clients is the same. Where no entry
    holds a model the directory is no store either. Raises ConfigurationError where only some do,
    or two have one name.
    """
    entries = sorted(path.iterdir()) if path.is_dir() else []
    if len(entries) < 2 or not all(each.is_dir() or is_archive(each.name) for each in entries):
        return {}
    others = [each for each in entries if each.is_dir() and not holds_model(open_model_dir(each))]
    if len(others) == len(entries):
        return {}
    if others:
        names = ", ".join(each.name for each in others)
        raise ConfigurationError(
            f"{path} is a store of several models, since each of its entries is a directory or an "
            f"archive; but {names} holds no model (config.json, serving.properties, model.py): "
            "take it out, or put a serving.properties beside it if all of it is one model"
        )
    models = {without_suffix(each.name): each for each in entries}
    if len(models) < len(entries):
        raise ConfigurationError(f"{path} has two models of one name: rename a file or directory")
    return models
