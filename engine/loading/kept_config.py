"""Keeps a model's config as transformers has read it, so that later starts need no transformers.

A config.json leaves out what its type has by default, and only transformers knows the defaults. To
import it takes a small model a third of the start. So the first start with our own decoder keeps
the settings, under all names that they have.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from core.process.measured import keep, path_of
from engine.loading.model_source import KeptConfig, ModelSource
from engine.model.published.settings import read_spec
from engine.model.rotary import OWN_KINDS
from engine.model.spec import DecoderSpec

UNREAD = {"id2label", "ignore_keys_at_rope_validation", "torch_dtype", "use_return_dict"}
"""Settings that no decoder reads. JSON cannot hold the first two. The others are old names."""


def read_kept(model_dir: Path) -> Any:
    """Return the KeptConfig of a model; None if no start has kept one."""
    try:
        return KeptConfig(*json.loads(_path(model_dir).read_bytes()))
    except (OSError, ValueError):
        return None


def keep_config(source: ModelSource, spec: DecoderSpec) -> None:
    """Keep a config for `read_kept`, if the settings alone give the same spec.

    spec: that of the decoder that has passed the trial.
    """
    config: Any = source.config
    has_other_parts = config is not spec.config or config.is_heterogeneous
    needs_library = {rope["rope_type"] for rope in spec.ropes.values()} - OWN_KINDS
    if has_other_parts or needs_library or not source.is_keepable:
        return
    path, settings = _path(source.model_dir), _settings(config)
    if path.is_file() or settings is None:
        return
    kept: Any = KeptConfig(settings, config.to_json_string())
    if replace(read_spec(kept, spec.max_length), config=config) == spec:
        keep(path, json.dumps([settings, kept.to_json_string()]).encode())


def _path(model_dir: Path) -> Path:
    """Return the file of what is kept. Raises OSError if the model has no config.json."""
    versions = _own_version(), version("transformers"), torch.__version__
    content = (model_dir / "config.json").read_bytes()
    return path_of(hashlib.sha256(repr((versions, content)).encode()).hexdigest()[:32], ".config")


def _own_version() -> str:
    """Return Longshore's version; '' in a clone that pip has not installed (for `make gpu`)."""
    try:
        return version("longshore")
    except PackageNotFoundError:
        return ""


def _settings(config: Any) -> dict[str, Any] | None:
    """Return the settings, with the dtype by its name; None if JSON cannot hold them all."""
    found: dict[str, Any] = {}
    for name in {*dir(config), *config.attribute_map} - UNREAD:
        try:
            value = getattr(config, name)
        except Exception:  # a property that needs settings of other models
            continue
        if name.startswith("_") or callable(value):
            continue
        if name == "dtype" and value is not None:
            value = str(value).removeprefix("torch.")
        if _is_json(value):
            found[name] = value
        elif name in vars(config):
            return None
    return found


def _is_json(value: object) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False
