"""What a command line sets for one of several models, beside the model's own configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from container.configuration.flags import add_flags, flag_name, read_flags
from container.configuration.properties import Setting
from container.configuration.resolve import Configuration, load_configuration
from container.models.directory import find_properties
from core.options import option_table


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

    def arguments(self) -> list[str]:
        """Return these overrides as arguments, which `read_overrides` reads."""
        names = {option.key: flag_name(option) for option in option_table().values()}
        properties = [] if self.properties is None else [f"--properties={self.properties}"]
        return [*properties, *(f"{names[flag.key]}={flag.text}" for flag in self.flags)]


def read_overrides(arguments: Sequence[str]) -> Overrides:
    """Read the arguments of a model's container."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--properties", type=Path)
    add_flags(parser)
    parsed = parser.parse_args(arguments)
    return Overrides(parsed.properties, tuple(read_flags(parsed)))
