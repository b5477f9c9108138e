"""The user's own code, a model.py: which of its functions answer, and what its errors become."""

from __future__ import annotations

import importlib.util
import logging
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from core.errors import ConfigurationError
from engine.tasks.djl_handler import DjlHandler
from engine.tasks.performer import Performer
from engine.tasks.sagemaker_handler import SageMakerHandler

logger = logging.getLogger(__name__)

_MODULE = "model"


def load_handler(path: Path, properties: Mapping[str, str]) -> Performer:
    """Runs the file, which may import what lies beside it, and gets its functions ready.

    Raises ConfigurationError, with the file and the line, for whatever that raises.
    """
    try:
        module = _imported(path)
        if callable(handle := getattr(module, "handle", None)):
            return DjlHandler(handle, properties)
        if callable(getattr(module, "model_fn", None)):
            return SageMakerHandler(module, path.parent)
    except (Exception, SystemExit) as error:
        logger.exception("the handler cannot start")
        hint = "; name it in requirements.txt" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigurationError(
            f"{_place(error, path)}: {type(error).__name__}: {_message(error)}{hint}"
        ) from error
    raise ConfigurationError(
        f"{path}: defines neither handle(inputs) nor model_fn(model_dir), so nothing can answer"
    )


def _imported(path: Path) -> ModuleType:
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


def _place(error: BaseException, path: Path) -> str:
    """The last line of the user's own files that an error came through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if Path(each.filename).is_relative_to(path.parent)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(path)


def _message(error: BaseException) -> str:
    return (error.msg or "") if isinstance(error, SyntaxError) else str(error)
