"""The user's own code, a model.py: which of its functions answer, and what its errors become."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from core.errors import ConfigurationError
from core.user_code import run_file, start_error
from engine.tasks.handlers.djl import DjlHandler
from engine.tasks.handlers.sagemaker import SageMakerHandler
from engine.tasks.performer import Performer

logger = logging.getLogger(__name__)


def load_handler(path: Path, properties: Mapping[str, str]) -> Performer:
    """Runs the file, which may import what lies beside it, and gets its functions ready.

    Raises ConfigurationError, with the file and the line, for whatever that raises.
    """
    try:
        module = run_file(path)
        if callable(handle := getattr(module, "handle", None)):
            return DjlHandler(handle, properties)
        if callable(getattr(module, "model_fn", None)):
            return SageMakerHandler(module, path.parent)
    except (Exception, SystemExit) as error:
        logger.exception("the handler cannot start")
        raise start_error(error, path) from error
    raise ConfigurationError(
        f"{path}: defines neither handle(inputs) nor model_fn(model_dir), so nothing can answer"
    )
