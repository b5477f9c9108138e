"""Settings from the command line that override the configuration of one of several models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from container.configuration.properties import Setting
from container.configuration.resolve import Configuration, load_configuration
from container.model_files.directory import find_properties


@dataclass(frozen=True, slots=True)
class Overrides:
    """The configuration file and the flags of a model."""

    properties: Path | None = None
    """None: the serving.properties in the model's directory, if there is one."""
    flags: tuple[Setting, ...] = ()

    def load(self, model_dir: Path, variables: Mapping[str, str]) -> Configuration:
        """Return the configuration of a model. Raises ConfigurationError if it is invalid."""
        path = self.properties or find_properties(model_dir)
        return load_configuration(path, variables, self.flags)

    def as_json(self) -> str:
        """Return the overrides for `overrides_from_json` in a model's container."""
        return msgspec.json.encode((str(self.properties or ""), self.flags)).decode()


def overrides_from_json(text: str) -> Overrides:
    """Return the overrides that `Overrides.as_json` wrote."""
    properties, flags = msgspec.json.decode(text, type=tuple[str, tuple[Setting, ...]])
    return Overrides(Path(properties) if properties else None, flags)
