"""Resolves options from flags, serving.properties and the environment, with their sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from core.configuration.options import Options, make_options, option_table
from core.configuration.record import Option, Value
from core.configuration.suggest import did_you_mean
from core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Configuration:
    """The effective options, their sources, and the warnings to show."""

    options: Options
    sources: Mapping[str, str]
    """Where each option was set, by the option's name. Options at their default are absent."""
    warnings: tuple[str, ...]
    properties_path: Path | None
    handler_options: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options for the user's handler only: their names without `option.`, and their texts."""


def load_configuration(
    path: Path | None, variables: Mapping[str, str], flags: Sequence[Setting] = ()
) -> Configuration:
    """Read the flags, the properties file (unless `path` is None) and the environment variables.

    If there is a handler beside the file, it gets the unknown keys of the file that begin with
    `option.`. Raises ConfigurationError, listing all errors in all sources.
    """
    settings = read_properties(path) if path else ()
    environment = read_environment(variables)
    collector = _SettingCollector(list(environment.errors), list(environment.warnings))
    collector.add(flags)
    collector.add(environment.above_file)
    collector.add_file(settings)
    collector.add(environment.below_file)
    handler_options = collector.resolve_unknown(path)
    if collector.errors:
        raise ConfigurationError("\n".join(collector.errors))
    return Configuration(
        make_options(collector.values),
        collector.sources,
        tuple(collector.warnings),
        path,
        handler_options,
    )


@dataclass(slots=True)
class _SettingCollector:
    """Collects settings in order of precedence: the first setting of an option wins."""

    errors: list[str]
    warnings: list[str]
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    unknown: list[Setting] = field(default_factory=list[Setting])

    def add_file(self, settings: Iterable[Setting]) -> None:
        """Add the entries of a file. The last entry of a repeated key wins, with a warning."""
        last: dict[str, tuple[Option, Setting]] = {}
        for setting in settings:
            option = self._option(setting)
            if option is None:
                continue
            if option.name in last:
                earlier = last[option.name][1]
                self.warnings.append(f"{setting.source}: {setting.key} repeats {earlier.source}")
            last[option.name] = (option, setting)
        for option, setting in last.values():
            self._set(option, setting)

    def add(self, settings: Iterable[Setting]) -> None:
        options = _options_by_key()
        for setting in settings:
            self._set(options[setting.key], setting)

    def resolve_unknown(self, path: Path | None) -> dict[str, str]:
        """Return unknown options as handler options if there is a handler, else record errors."""
        handler_options: dict[str, str] = {}
        for setting in self.unknown:
            nearest = _nearest_key(setting.key)
            name = setting.key.removeprefix("option.")
            if name != setting.key and path is not None and self._has_handler(path):
                handler_options[name] = setting.text
                self.warnings.append(
                    f"{setting.source}: {setting.key} is passed to the handler{nearest}"
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

    def _option(self, setting: Setting) -> Option | None:
        """Return the option that an entry of the file sets. If it sets none, record that."""
        option = _options_by_key().get(ALIASES.get(setting.key, setting.key))
        if option is None and setting.key in ADVICE:
            advice = ADVICE[setting.key]
            self.warnings.append(f"{setting.source}: {setting.key} has no effect here: {advice}")
        elif option is None:
            self.unknown.append(setting)
        return option

    def _set(self, option: Option, setting: Setting) -> None:
        if option.name in self.sources:
            winner = self.sources[option.name]
            if winner != setting.source:
                self.warnings.append(f"{setting.source}: overridden by {winner}")
            return
        self.sources[option.name] = setting.source
        advice = REMOVED_VALUES.get((option.key, setting.text))
        if advice:
            self.errors.append(
                f"{setting.source}: {option.key}={setting.text} is not supported: {advice}"
            )
            return
        try:
            value = option.parse(VALUE_ALIASES.get((option.key, setting.text), setting.text))
            option.check(value)
        except ConfigurationError as error:
            self.errors.append(f"{setting.source}: {error}")
        else:
            self.values[option.name] = value


def _options_by_key() -> dict[str, Option]:
    return {option.key: option for option in option_table().values()}


def _nearest_key(key: str) -> str:
    known = _options_by_key()
    # Users often forget or add the prefix, so first look for the same name with or without it.
    bare = key.removeprefix("option.")
    for candidate in (bare, f"option.{bare}"):
        if candidate in known:
            return f"; did you mean '{candidate}'?"
    return did_you_mean(key, known)
