"""Finds the user's functions that the options name as hooks (`container/hooks/`)."""

from __future__ import annotations

from container.model_files.directory import ModelPlace
from core.configuration.options import UserCodeOptions
from core.errors import ConfigurationError

HOOKS = (
    "ping_hook", "throttle_hook", "pre_post_process_hook", "pre_process_hook", "post_process_hook",
)  # fmt: skip
"""The options that name a function."""
_MODEL = "model"
"""AWS's other name for the file model.py."""


def find_hooks(place: ModelPlace, code: UserCodeOptions) -> dict[str, str]:
    """Return the hooks by the names of their options, each as /PATH/FILE.py:FUNCTION.

    Files are looked for where `handler_file.find_handler` looks. Raises ConfigurationError if one
    is missing, or if option.pre_post_process_hook is set together with option.pre_process_hook or
    option.post_process_hook.
    """
    given = {name: getattr(code, name) for name in HOOKS}
    given = {name: text for name, text in given.items() if text is not None}
    for name in ("pre_process_hook", "post_process_hook"):
        if name in given and "pre_post_process_hook" in given:
            raise ConfigurationError(
                f"option.{name} does not work together with option.pre_post_process_hook, which "
                "does both; leave one out"
            )
    return {name: _found(place, name, given[name]) for name in given}


def _found(place: ModelPlace, option: str, text: str) -> str:
    file, _, function = text.rpartition(":")
    file = "model.py" if file == _MODEL else file
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigurationError(f"option.{option}={text}: expected FILE.py:FUNCTION")
    path = place.user_file(file)
    if path is None:
        raise ConfigurationError(
            f"option.{option}={text}: there is no file {file} beside serving.properties or in "
            f"{place.model_dir}"
        )
    return f"{path.resolve()}:{function}"
