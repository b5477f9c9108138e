"""From files and variables to options, each with the place it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from container.configuration.environment import read_environment
from container.configuration.lmi import (
    ADVICE,
    ALIASES,
    REMOVED_VALUES,
    VALUE_ALIASES,
    handler_name,
    is_built_in_handler,
)
from container.configuration.properties import Setting, read_properties
from core.errors import ConfigurationError
from core.options import Option, Options, Value, make_options, option_table
from core.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Configuration:
    """The options in effect, where each one that was set came from, and what to warn of."""

    options: Options
    sources: Mapping[str, str]
    """By the option's name; options that nobody set are missing."""
    warnings: tuple[str, ...]
    properties_path: Path | None
    handler_options: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options that only the user's own handler knows, as the file gives them."""


def load_configuration(path: Path | None, variables: Mapping[str, str]) -> Configuration:
    """Reads the file, where there is one, and the environment.

    A file beside a handler may have options of its own for it. Raises ConfigurationError that lists
    everything wrong in both, not only the first.
    """
    settings = read_properties(path) if path else ()
    environment = read_environment(variables)
    collected = _Collected(list(environment.errors), list(environment.warnings))
    collected.fill(environment.above_file)
    collected.take_file(settings)
    collected.fill(environment.below_file)
    handler_options = collected.settle_unknown(path)
    if collected.errors:
        raise ConfigurationError("\n".join(collected.errors))
    return Configuration(
        make_options(collected.values),
        collected.sources,
        tuple(collected.warnings),
        path,
        handler_options,
    )


@dataclass(slots=True)
class _Collected:
    """Settings taken in by falling precedence: what is set already stays."""

    errors: list[str]
    warnings: list[str]
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    unknown: list[Setting] = field(default_factory=list[Setting])

    def take_file(self, settings: Iterable[Setting]) -> None:
        """The entries of a file: the last of a repeated key counts, with a warning."""
        last: dict[str, tuple[Option, Setting]] = {}
        for setting in settings:
            row = self._row(setting)
            if row is None:
                continue
            if row.name in last:
                earlier = last[row.name][1]
                self.warnings.append(f"{setting.source}: {setting.key} repeats {earlier.source}")
            last[row.name] = (row, setting)
        for row, setting in last.values():
            self._set(row, setting)

    def fill(self, settings: Iterable[Setting]) -> None:
        rows = _rows_by_key()
        for setting in settings:
            self._set(rows[setting.key], setting)

    def settle_unknown(self, path: Path | None) -> dict[str, str]:
        """Unknown options are a handler's where the file has one, else errors."""
        handler_options: dict[str, str] = {}
        for setting in self.unknown:
            nearest = _nearest_key(setting.key)
            name = setting.key.removeprefix("option.")
            if name != setting.key and path is not None and self._has_handler(path):
                handler_options[name] = setting.text
                self.warnings.append(
                    f"{setting.source}: {setting.key} is handed to the handler{nearest}"
                )
            else:
                self.errors.append(f"{setting.source}: unknown key '{setting.key}'{nearest}")
        return handler_options

    def _has_handler(self, path: Path) -> bool:
        entry_point = self.values.get("entryPoint")
        if entry_point is not None and is_built_in_handler(str(entry_point)):
            return False
        name = handler_name(None if entry_point is None else str(entry_point))
        return (path.parent / name).is_file()

    def _row(self, setting: Setting) -> Option | None:
        """The option that an entry of the file sets, or None after saying why there is none."""
        row = _rows_by_key().get(ALIASES.get(setting.key, setting.key))
        if row is None and setting.key in ADVICE:
            advice = ADVICE[setting.key]
            self.warnings.append(f"{setting.source}: {setting.key} has no effect here: {advice}")
        elif row is None:
            self.unknown.append(setting)
        return row

    def _set(self, row: Option, setting: Setting) -> None:
        if row.name in self.sources:
            overrules = self.sources[row.name]
            if overrules != setting.source:
                self.warnings.append(f"{setting.source}: {overrules} comes first")
            return
        self.sources[row.name] = setting.source
        removed = REMOVED_VALUES.get((row.key, setting.text))
        if removed:
            self.errors.append(
                f"{setting.source}: {row.key}={setting.text} is not served: {removed}"
            )
            return
        try:
            value = row.parse(VALUE_ALIASES.get((row.key, setting.text), setting.text))
            row.check(value)
        except ConfigurationError as error:
            self.errors.append(f"{setting.source}: {error}")
        else:
            self.values[row.name] = value


def _rows_by_key() -> dict[str, Option]:
    return {row.key: row for row in option_table().values()}


def _nearest_key(key: str) -> str:
    known = _rows_by_key()
    # The prefix is what people forget or add, so the name without it decides first.
    bare = key.removeprefix("option.")
    for candidate in (bare, f"option.{bare}"):
        if candidate in known:
            return f"; did you mean '{candidate}'?"
    return did_you_mean(key, known)
