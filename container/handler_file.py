"""The user's own handler: where its file lies, and whether it has what answers requests."""

from __future__ import annotations

import logging
import re
import symtable
from pathlib import Path

from container.configuration import Configuration
from container.lmi import handler_name, is_built_in_handler
from core.errors import ConfigurationError

logger = logging.getLogger(__name__)

_ANSWERING = ("handle", "model_fn")


def find_handler(configuration: Configuration, model_dir: Path) -> Path | None:
    """The file of `option.entryPoint`, else a model.py; None where the model itself is served.

    Both lie beside serving.properties or in the model directory. Raises ConfigurationError for a
    file that is named and cannot answer, and for one that is not Python, with the line.
    """
    entry_point = configuration.options.entryPoint
    if entry_point is not None and is_built_in_handler(entry_point):
        return None
    if entry_point is not None and entry_point.startswith(("djl_python.", "http:", "https:")):
        raise ConfigurationError(
            f"option.entryPoint={entry_point}: name a file beside serving.properties, or leave it "
            "out: option.task says what to do with a model"
        )
    name = handler_name(entry_point)
    properties = configuration.properties_path
    directories = [properties.parent, model_dir] if properties else [model_dir]
    path = next((each / name for each in directories if (each / name).is_file()), None)
    if path is None and entry_point is not None:
        raise ConfigurationError(
            f"option.entryPoint={entry_point}: there is no file {directories[0] / name}; "
            "name one beside serving.properties, or leave it out"
        )
    if path is None or _answers(path):
        return path.resolve() if path else None
    problem = f"{path} defines neither handle(inputs) nor model_fn(model_dir)"
    if entry_point is not None or not _has_model(configuration, model_dir):
        raise ConfigurationError(f"{problem}, so nothing can answer")
    logger.warning("%s: the model itself is served, as in LMI, and nothing of the file", problem)
    return None


def _answers(path: Path) -> bool:
    """Whether the module would have one of the names; what it imports counts."""
    try:
        source = path.read_text("utf-8")
        names = symtable.symtable(source, str(path), "exec").get_identifiers()
    except SyntaxError as error:
        raise ConfigurationError(f"{path}:{error.lineno}: SyntaxError: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    imports_all = re.search(r"^from .+ import \*", source, re.MULTILINE)
    return bool(imports_all) or any(name in names for name in _ANSWERING)


def _has_model(configuration: Configuration, model_dir: Path) -> bool:
    return configuration.options.model_id is not None or (model_dir / "config.json").is_file()
