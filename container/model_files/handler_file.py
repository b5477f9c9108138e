"""Finds the user's Python file and checks whether it defines a handler or formatters."""

from __future__ import annotations

import ast
import logging
import re
import symtable
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from container.configuration.lmi import (
    INVOCATION_HANDLER_ADVICE,
    handler_name,
    is_built_in_handler,
)
from container.model_files.directory import ModelPlace
from core.errors import ConfigurationError
from core.files.gguf import find_gguf

logger = logging.getLogger(__name__)

_HANDLER_NAMES = ("handle", "model_fn")
_NO_HANDLER = "neither handle(inputs) nor model_fn(model_dir)"
_FORMATTER_DECORATORS = ("input_formatter", "output_formatter")
_UNSUPPORTED_DECORATORS = ("prediction_handler", "predict_formatter", "init_handler")
_HOOK_ADVICE = "name the function in option.{}=model.py:FUNCTION"
_HOOKS: Mapping[str, str] = {
    "custom_ping_handler": _HOOK_ADVICE.format("ping_hook"),
    "custom_sagemaker_ping_handler": _HOOK_ADVICE.format("ping_hook"),
    "custom_invocation_handler": INVOCATION_HANDLER_ADVICE,
    "custom_sagemaker_invocation_handler": INVOCATION_HANDLER_ADVICE,
    "custom_middleware": _HOOK_ADVICE.format("pre_post_process_hook or option.throttle_hook"),
    "register_middleware": _HOOK_ADVICE.format("pre_post_process_hook or option.throttle_hook"),
    "input_formatter": _HOOK_ADVICE.format("pre_process_hook"),
    "output_formatter": _HOOK_ADVICE.format("post_process_hook"),
}
"""Decorators and functions of AWS's container standards, and what to do instead of using them. Two
of the decorators are LMI's, too, so decorators count only in a file that imports AWS's package."""
_STANDARDS = "model_hosting_container_standards"


def find_handler(place: ModelPlace, entry_point: str | None) -> Path | None:
    """Return the user's file if it defines a handler, or None if the engine serves the model.

    entry_point: option.entryPoint, by default model.py. Looks for it beside serving.properties,
    then in the model directory. Raises ConfigurationError if the file cannot be read, has a syntax
    error, uses an unsupported decorator, or defines both a handler and formatters. Also raises it
    if the file defines no handler and there is no model that could answer requests, or if the file
    of option.entryPoint is missing or defines neither a handler nor formatters.
    """
    if entry_point is not None and is_built_in_handler(entry_point):
        return None
    if entry_point is not None and entry_point.startswith(("djl_python.", "http:", "https:")):
        raise ConfigurationError(
            f"option.entryPoint={entry_point}: use a file beside serving.properties, or leave it "
            "out and set option.task"
        )
    path = _file(place, entry_point)
    if path is None:
        return None
    defined = _definitions(path)
    if defined.has_handler and defined.has_formatters:
        raise ConfigurationError(
            f"{path}: formatters do not work together with handle(inputs) or model_fn(model_dir), "
            "which replace the model; define one or the other"
        )
    if defined.has_handler:
        return path.resolve()
    problem = "has formatters but no model" if defined.has_formatters else f"defines {_NO_HANDLER}"
    if not _has_model(place) or (entry_point is not None and not defined.has_formatters):
        raise ConfigurationError(f"{path} {problem}, so nothing can answer requests")
    if not defined.has_formatters:
        logger.warning(
            "%s defines %s: serving the model, as LMI does",
            path,
            _NO_HANDLER,
        )
    return None


def find_formatters(place: ModelPlace, entry_point: str | None) -> Path | None:
    """Return the user's file if it has formatters, else None.

    It is the file that `find_handler` looks at or, with a built-in handler, model.py.
    Call this only after `find_handler` has returned None.
    """
    is_built_in = entry_point is not None and is_built_in_handler(entry_point)
    path = _file(place, None if is_built_in else entry_point)
    return path.resolve() if path is not None and _definitions(path).has_formatters else None


def _file(place: ModelPlace, entry_point: str | None) -> Path | None:
    name = handler_name(entry_point)
    path = place.user_file(name)
    if path is None and entry_point is not None:
        raise ConfigurationError(
            f"option.entryPoint={entry_point}: there is no file {place.folders[0] / name}; "
            "use a file beside serving.properties, or leave it out"
        )
    return path


@dataclass(frozen=True, slots=True)
class _Definitions:
    """The definitions in a user's file, found without running it."""

    has_handler: bool
    """Whether the module defines or imports a handler function, or may do so by `import *`."""
    has_formatters: bool
    """Whether a function is decorated as a formatter."""


def _definitions(path: Path) -> _Definitions:
    try:
        source = path.read_text("utf-8")
        names = symtable.symtable(source, str(path), "exec").get_identifiers()
        module = ast.parse(source)
    except SyntaxError as error:
        raise ConfigurationError(f"{path}:{error.lineno}: SyntaxError: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    _refuse_standards(path, module)
    decorators = _decorators(module)
    for name in _UNSUPPORTED_DECORATORS:
        if name in decorators:
            raise ConfigurationError(
                f"{path}:{decorators[name]}: @{name} is not supported; write handle(inputs) or "
                "model_fn(model_dir) and predict_fn(data, model)"
            )
    has_formatters = any(name in decorators for name in _FORMATTER_DECORATORS)
    imports_all = re.search(r"^from .+ import \*", source, re.MULTILINE)
    may_import = bool(imports_all) and not has_formatters
    return _Definitions(may_import or any(name in names for name in _HANDLER_NAMES), has_formatters)


def _decorators(module: ast.Module) -> dict[str, int]:
    """Return the decorators of the module's functions: their names and line numbers."""
    functions = [
        node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        ast.unparse(decorator).rpartition(".")[2]: decorator.lineno
        for function in functions
        for decorator in function.decorator_list
    }


def _refuse_standards(path: Path, module: ast.Module) -> None:
    """Raise ConfigurationError if AWS's package would find a function of the module by itself."""
    imports = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Import | ast.ImportFrom) and _STANDARDS in ast.unparse(node)
    ]
    decorators = _decorators(module) if imports else {}
    functions = {
        node.name: node.lineno
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("custom_sagemaker_")
    }
    for name, line in {**functions, **decorators}.items():
        plain = name.partition("(")[0]  # as in @custom_middleware("throttle")
        if plain in _HOOKS:
            raise ConfigurationError(
                f"{path}:{line}: {plain} has no effect here by itself; {_HOOKS[plain]}"
            )


def _has_model(place: ModelPlace) -> bool:
    has_config = (place.model_dir / "config.json").is_file()
    return place.source.model_id is not None or has_config or bool(find_gguf(place.model_dir))
