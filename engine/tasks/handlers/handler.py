"""Load the user's model.py and choose the handler interface that it implements."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from core.errors import ConfigurationError
from core.foreign_code import contained
from core.process.user_code import run_file, start_error
from engine.tasks.handlers.djl import DjlHandler
from engine.tasks.handlers.sagemaker import SageMakerHandler
from engine.tasks.performer import Performer

logger = logging.getLogger(__name__)


def load_handler(path: Path, properties: Mapping[str, str]) -> Performer:
    """Run the file and initialize its handler. The file may import modules beside it.

    Raises ConfigurationError with file and line for anything the user's code raises.
    """
    try:
        with contained:
            module = run_file(path)
            if callable(handle := getattr(module, "handle", None)):
                return DjlHandler(handle, properties)
            if callable(getattr(module, "model_fn", None)):
                return SageMakerHandler(module, path.parent)
    except Exception as error:
        logger.exception("the handler cannot start")
        raise start_error(error, path) from error
    raise ConfigurationError(f"{path}: defines neither handle(inputs) nor model_fn(model_dir)")
