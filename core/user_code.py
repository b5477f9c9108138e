"""Running a file of the user's own, a model.py, and saying where it is wrong."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from core.errors import ConfigurationError

_MODULE = "model"


def run_file(path: Path) -> ModuleType:
    """The module of a file, which may import what lies beside it. Raises whatever it raises."""
    directory = str(path.parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None, "a .py file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # where pickle, for one, looks for its classes
    spec.loader.exec_module(module)
    return module


def start_error(error: BaseException, path: Path) -> ConfigurationError:
    """What a file raised while it was run, with the line."""
    hint = "; name it in requirements.txt" if isinstance(error, ModuleNotFoundError) else ""
    return ConfigurationError(
        f"{_place(error, path)}: {type(error).__name__}: {_message(error)}{hint}"
    )


def _place(error: BaseException, path: Path) -> str:
    """The last line of the user's own files that an error came through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if Path(each.filename).is_relative_to(path.parent)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(path)


def _message(error: BaseException) -> str:
    return (error.msg or "") if isinstance(error, SyntaxError) else str(error)
