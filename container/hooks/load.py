"""Loads the functions that the options name as hooks. As a process, checks that they load."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from core.errors import ConfigurationError
from core.foreign_code import contained
from core.process.internal_arguments import internal_arguments
from core.process.user_code import exit_code_of_check, run_file, start_error

Function = Callable[..., object]

_MIDDLEWARE = ("throttle_hook", "pre_post_process_hook")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The user's functions. Each field has the name of its option."""

    ping_hook: Function | None = None
    """() or (request) → the response of /ping, if the engine is healthy."""
    throttle_hook: Function | None = None
    """(request, call_next) → the response; around all other hooks."""
    pre_post_process_hook: Function | None = None
    """(request, call_next) → the response."""
    pre_process_hook: Function | None = None
    """(request) → the request."""
    post_process_hook: Function | None = None
    """(response) → the response."""


def load_hooks(places: Mapping[str, str], library_dir: str) -> Hooks:
    """Run the files, each once, and return the functions. `places`: option → FILE:FUNCTION.

    Raises ConfigurationError if a file lacks the function or fails. The message of a failure names
    the line.
    """
    if library_dir:
        sys.path.insert(0, library_dir)
    modules: dict[str, ModuleType] = {}
    functions: dict[str, Function] = {}
    for option, place in places.items():
        file, _, name = place.rpartition(":")
        if file not in modules:
            modules[file] = _run(Path(file))
        functions[option] = _function(modules[file], option, place, name)
    return Hooks(**functions)


def _run(path: Path) -> ModuleType:
    try:
        with contained:
            return run_file(path)
    except Exception as error:
        raise start_error(error, path) from error


def _function(module: ModuleType, option: str, place: str, name: str) -> Function:
    function = getattr(module, name, None)
    if function is None:
        raise ConfigurationError(f"option.{option}={place}: the file has no such function")
    is_async = inspect.iscoroutinefunction(function)
    if not inspect.isfunction(function) or (option in _MIDDLEWARE and not is_async):
        expected = "async def f(request, call_next)" if option in _MIDDLEWARE else "a function"
        raise ConfigurationError(f"option.{option}={place}: expected {expected}")
    return function


def main(library_dir: str, *assignments: str) -> int:
    """Check the functions of `assignments`, OPTION=FILE:FUNCTION, and return the exit code."""
    options = dict(text.split("=", 1) for text in assignments)
    return exit_code_of_check(lambda: load_hooks(options, library_dir))


if __name__ == "__main__":
    description = "Checks that hooks can be loaded. `longshore serve` starts it."
    form = "LIBRARY_DIR ASSIGNMENT..."
    sys.exit(main(*internal_arguments("container.hooks.load", description, form)))
