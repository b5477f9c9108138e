"""Runs a file of the user's code (model.py), and reports where it fails."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from core.errors import ConfigurationError
from core.foreign_code import EscapedError
from core.process.names import full_name

_MODULE = "model"
_DJL_PYTHON = "djl_python"
"""The name that user code imports."""
_OURS = "engine.tasks.handlers.djl_python"


def run_file(path: Path) -> ModuleType:
    """Run a file and return it as a module. Raises whatever the file raises.

    The file may import modules from its own directory.
    """
    _provide_djl_python()
    directory = str(path.parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None, "every .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # pickle, for example, looks up classes here
    spec.loader.exec_module(module)
    return module


def _provide_djl_python() -> None:
    """Make `import djl_python` find our package, which has a longer name.

    Modules that user code imports must be the same objects as ours, since `isinstance` decides
    what an answer is.
    """
    ours = importlib.import_module(full_name(_OURS))
    for info in pkgutil.iter_modules(ours.__path__):
        module = importlib.import_module(f"{ours.__name__}.{info.name}")
        sys.modules.setdefault(f"{_DJL_PYTHON}.{info.name}", module)
    sys.modules.setdefault(_DJL_PYTHON, ours)


def start_error(raised: Exception, path: Path) -> ConfigurationError:
    """Return the error to report for an exception that a file raised, with file and line."""
    error = raised.error if isinstance(raised, EscapedError) else raised
    hint = "; name it in requirements.txt" if isinstance(error, ModuleNotFoundError) else ""
    return ConfigurationError(
        f"{_place(error, path)}: {type(error).__name__}: {_message(error)}{hint}"
    )


def exit_code_of_check(load: Callable[[], object]) -> int:
    """Load the user's files. Return 0, or 2 after printing what is wrong with them."""
    try:
        load()
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _place(error: BaseException, path: Path) -> str:
    """Return the innermost line of the traceback that is in the user's own files."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(path.parent)]
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else str(path)


def _message(error: BaseException) -> str:
    return (error.msg or "") if isinstance(error, SyntaxError) else str(error)
