"""Translates a model in a GGUF file into a directory with a config.json and a tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path

from core.errors import ConfigurationError
from core.files.gguf import find_gguf, translated
from core.process.names import python_command
from core.process.tied_command import run_to_end

logger = logging.getLogger(__name__)


def model_directory(path: Path) -> Path:
    """Return the directory with config.json and the tokenizer of the model at `path`.

    That is `path`, unless it is a GGUF file or a directory with one. Raises ConfigurationError if
    the file cannot be read.
    """
    files = find_gguf(path)
    if not files:
        return path

    def write(directory: Path) -> None:
        logger.info("reading %s", files[0])
        # In another process, because this one does without transformers.
        command = python_command("engine.model.gguf.translate")
        result = run_to_end([*command, str(directory), *(str(file.absolute()) for file in files)])
        if result.returncode != 0:
            raise ConfigurationError(result.stderr.strip())

    return translated(files, write)
