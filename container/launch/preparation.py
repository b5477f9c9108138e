"""Steps before any process starts: fetch the model, choose the task, install requirements."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from container.configuration.report import format_value
from container.configuration.resolve import Configuration
from container.model_files.directory import (
    ModelPlace,
    model_place,
    open_model_dir,
    resolve_model_dir,
)
from container.model_files.gguf import model_directory
from container.model_files.handler_file import find_formatters, find_handler
from container.model_files.hook_files import find_hooks
from container.model_files.requirements import install_requirements_file
from container.model_files.s3 import download_from_s3
from container.security.api_keys import configured_keys
from container.security.tls import tls_context
from container.tracing.endpoint import check_traces_endpoint
from core.configuration.options import UserCodeOptions
from core.configuration.task import Task, check_options, choose_task
from core.errors import ConfigurationError
from core.process.names import python_command
from core.process.tied_command import run_to_end
from core.text.template_files import load_chat_template
from core.text.tokenizer import tokenizer_file


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The model's part of `core.protocol.launch.Launch`."""

    model_dir: Path
    """The directory of the model's files; for a handler, the directory of its file."""
    task: Task
    library_dir: Path | None = None
    """The packages installed from requirements.txt, if any."""
    formatters: Path | None = None
    """The file with the user's formatters, if the engine serves the model itself."""
    hooks: dict[str, str] = field(default_factory=dict[str, str])
    """The user's hooks, as `find_hooks` returns them."""


def prepare(configuration: Configuration, model_dir: Path) -> PreparedModel:
    """Download the model and install requirements as needed, and choose the task.

    Raises ConfigurationError for errors that would otherwise appear later, in a child process.
    """
    options = configuration.options
    tls_context(options.server)
    configured_keys(options.server)
    check_traces_endpoint(options.server, configuration.sources.get("otlp_traces_endpoint", ""))
    place = model_place(configuration, model_dir)
    return _with_hooks(options.user_code, place, _prepare_model(configuration, place))


def _prepare_model(configuration: Configuration, place: ModelPlace) -> PreparedModel:
    options = configuration.options
    handler = find_handler(place, options.user_code.entryPoint)
    if handler is None:
        path = resolve_model_dir(place, options.model)
        task = choose_task(path, options)
        if task.kind == "generation":
            tokenizer_file(path)
            load_chat_template(path, options.model.chat_template)
        model = PreparedModel(path, task)
        return _with_formatters(options.user_code, configuration.handler_options, place, model)
    task = handler_task(configuration, handler, _model_id(place))
    return PreparedModel(handler.parent, task, _library_dir(options.user_code, handler))


def _with_formatters(
    code: UserCodeOptions,
    handler_options: Collection[str],
    place: ModelPlace,
    model: PreparedModel,
) -> PreparedModel:
    path = find_formatters(place, code.entryPoint)
    if path is None:
        return model
    _check_formatters(handler_options, path, model.task)
    library_dir = _library_dir(code, path)
    _check_in_process("container.apis.generation.formatters", str(path), str(library_dir or ""))
    return replace(model, formatters=path, library_dir=library_dir)


def _with_hooks(code: UserCodeOptions, place: ModelPlace, model: PreparedModel) -> PreparedModel:
    hooks = find_hooks(place, code)
    if not hooks:
        return model
    library_dir = model.library_dir
    if library_dir is None:
        library_dir = _library_dir(code, Path(next(iter(hooks.values()))))
    assignments = [f"{option}={place}" for option, place in hooks.items()]
    _check_in_process("container.hooks.load", str(library_dir or ""), *assignments)
    return replace(model, hooks=hooks, library_dir=library_dir)


def _check_in_process(module: str, *arguments: str) -> None:
    """Load the user's code in another process. Raises ConfigurationError with what that says."""
    result = run_to_end([*python_command(module), *arguments])
    if result.returncode != 0:
        raise ConfigurationError(result.stderr.strip())


def _check_formatters(handler_options: Collection[str], path: Path, task: Task) -> None:
    if task.kind != "generation":
        raise ConfigurationError(
            f"{path}: formatters work only for text generation, but the task is {task.name} "
            f"({task.reason}); write handle(inputs)"
        )
    if handler_options:
        raise ConfigurationError(
            f"unknown option.{next(iter(handler_options))}: only handle(inputs) "
            f"takes custom options, and {path} does not define it"
        )


def _library_dir(code: UserCodeOptions, file: Path) -> Path | None:
    if not code.install_requirements:
        return None
    return install_requirements_file(file.parent / "requirements.txt")


def handler_task(
    configuration: Configuration, handler: Path, more: Mapping[str, str] | None = None
) -> Task:
    """Return the task of a handler. Its properties are the options that were set, and `more`.

    Raises ConfigurationError as `choose_task` does.
    """
    options = configuration.options
    explicit = {name: format_value(options.of(name)) for name in configuration.sources}
    properties = {**explicit, **configuration.handler_options, **(more or {})}
    task = Task(
        kind="handler", name=str(handler), reason="the user's own code", properties=properties
    )
    check_options(task, options)
    return task


def expected_task(configuration: Configuration, model_dir: Path) -> Task | None:
    """Return the task, or None if it cannot be known without a download.

    Raises ConfigurationError as `prepare` does.
    """
    options, place = configuration.options, model_place(configuration, model_dir)
    handler = find_handler(place, options.user_code.entryPoint)
    if handler is not None:
        return handler_task(configuration, handler)
    path = model_directory(open_model_dir(place.path))
    if not (path / "config.json").is_file() and options.model.task is None:
        return None
    task = choose_task(path, options)
    formatters = find_formatters(place, options.user_code.entryPoint)
    if formatters is not None:
        _check_formatters(configuration.handler_options, formatters, task)
    return task


def _model_id(place: ModelPlace) -> Mapping[str, str]:
    """Return the `model_id` property of a handler: a local path if there is one, else a hub id."""
    model_id = place.source.model_id
    if model_id is None:
        return {}
    if model_id.startswith("s3://"):
        return {"model_id": str(download_from_s3(model_id))}
    return {"model_id": str(place.path.resolve()) if place.path.exists() else model_id}
