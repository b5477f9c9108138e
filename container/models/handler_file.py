"""The user's own code: where its file lies, and whether it answers requests or formats them."""

from __future__ import annotations

import ast
import logging
import re
import symtable
from dataclasses import dataclass
from pathlib import Path

from container.configuration.lmi import handler_name, is_built_in_handler
from container.configuration.resolve import Configuration
from core.errors import ConfigurationError

logger = logging.getLogger(__name__)

_ANSWERING = ("handle", "model_fn")
_NOTHING = "neither handle(inputs) nor model_fn(model_dir)"
_FORMATTERS = ("input_formatter", "output_formatter")
_UNSERVED_DECORATORS = ("prediction_handler", "predict_formatter", "init_handler")


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
    path = _file(configuration, model_dir, entry_point)
    if path is None:
        return None
    roles = _roles(path)
    if roles.answers and roles.formats:
        raise ConfigurationError(
            f"{path}: formatters are for the model itself, but handle(inputs) or "
            "model_fn(model_dir) answers in its place; leave out one or the other"
        )
    if roles.answers:
        return path.resolve()
    needs_model = "has formatters but no model" if roles.formats else f"defines {_NOTHING}"
    if not _has_model(configuration, model_dir) or (entry_point is not None and not roles.formats):
        raise ConfigurationError(f"{path} {needs_model}, so nothing can answer")
    if not roles.formats:
        logger.warning(
            "%s defines %s: the model itself is served, as in LMI, and nothing of the file",
            path,
            _NOTHING,
        )
    return None


def find_formatters(configuration: Configuration, model_dir: Path) -> Path | None:
    """The same file, where it has formatters for what the model itself answers.

    `find_handler` has been asked first, and has not found that the file answers.
    """
    entry_point = configuration.options.entryPoint
    is_built_in = entry_point is not None and is_built_in_handler(entry_point)
    path = _file(configuration, model_dir, None if is_built_in else entry_point)
    return path.resolve() if path is not None and _roles(path).formats else None


def _file(configuration: Configuration, model_dir: Path, entry_point: str | None) -> Path | None:
    name = handler_name(entry_point)
    properties = configuration.properties_path
    directories = [properties.parent, model_dir] if properties else [model_dir]
    path = next((each / name for each in directories if (each / name).is_file()), None)
    if path is None and entry_point is not None:
        raise ConfigurationError(
            f"option.entryPoint={entry_point}: there is no file {directories[0] / name}; "
            "name one beside serving.properties, or leave it out"
        )
    return path


@dataclass(frozen=True, slots=True)
class _Roles:
    """What a file is for, as its symbols say."""

    answers: bool
    """The module would have one of the names; what it imports counts."""
    formats: bool
    """A function is decorated as a formatter."""


def _roles(path: Path) -> _Roles:
    try:
        source = path.read_text("utf-8")
        names = symtable.symtable(source, str(path), "exec").get_identifiers()
        decorators = _decorators(ast.parse(source))
    except SyntaxError as error:
        raise ConfigurationError(f"{path}:{error.lineno}: SyntaxError: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    for name in _UNSERVED_DECORATORS:
        if name in decorators:
            raise ConfigurationError(
                f"{path}:{decorators[name]}: @{name} is not served; write handle(inputs), or "
                "model_fn(model_dir) and predict_fn(data, model)"
            )
    formats = any(name in decorators for name in _FORMATTERS)
    imports_all = re.search(r"^from .+ import \*", source, re.MULTILINE)
    may_import = bool(imports_all) and not formats
    return _Roles(may_import or any(name in names for name in _ANSWERING), formats)


def _decorators(module: ast.Module) -> dict[str, int]:
    """Names of the decorators of the module's functions, with their lines."""
    functions = [
        each for each in module.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        ast.unparse(decorator).rpartition(".")[2]: decorator.lineno
        for function in functions
        for decorator in function.decorator_list
    }


def _has_model(configuration: Configuration, model_dir: Path) -> bool:
    return configuration.options.model_id is not None or (model_dir / "config.json").is_file()
