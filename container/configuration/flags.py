"""Options as command-line flags: `--batching paged` sets option.batching."""

from __future__ import annotations

import argparse

from container.configuration.properties import Setting
from container.configuration.report import format_value
from core.configuration.options import option_table
from core.configuration.record import Option

_DESTINATION = "flag "
"""Prefix of flags in the parsed arguments. It has a space, unlike the names of other arguments."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option."""
    group = parser.add_argument_group(
        "options",
        "Each option is also a key of serving.properties and an environment variable. For\n"
        "example, --max-model-len is option.max_model_len and OPTION_MAX_MODEL_LEN. A name and\n"
        "a colon before a description mean that the option has an effect only with that\n"
        "strategy, executor, task or device, or together with that other option. A flag of kind\n"
        "true, false may stand alone: it is then true.",
    )
    for option in option_table().values():
        default = "" if option.default is None else f" Default: {format_value(option.default)}."
        group.add_argument(
            flag_name(option),
            dest=f"{_DESTINATION}{option.key}",
            metavar="VALUE",
            nargs="?" if option.kind is bool else None,
            const="true" if option.kind is bool else None,
            # argparse expands % in help texts.
            help=f"{option.kind_text}. {option.doc}{default}".replace("%", "%%"),
        )


def read_flags(parsed: argparse.Namespace) -> list[Setting]:
    """Return the options that flags set."""
    keys = {f"{_DESTINATION}{option.key}": option for option in option_table().values()}
    return [
        Setting(option.key, text, flag_name(option))
        for name, option in keys.items()
        if (text := getattr(parsed, name)) is not None
    ]


def flag_name(option: Option) -> str:
    """Return an option's flag, such as `--max-model-len`."""
    return f"--{option.name.replace('_', '-')}"
