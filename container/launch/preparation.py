"""What is settled before a process starts: the model, the task, a handler's packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from container.configuration.report import format_value
from container.configuration.resolve import Configuration
from container.models.directory import named_path, open_model_dir, resolve_model_dir
from container.models.handler_file import find_formatters, find_handler
from container.models.requirements import installed_requirements
from container.models.s3 import downloaded
from core.errors import ConfigurationError
from core.task import Task, check_options, choose_task
from core.text.template_files import load_chat_template
from core.text.tokenizer import tokenizer_file


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `core.messages.Launch` says of the model."""

    model_dir: Path
    """For a handler, where its file lies."""
    task: Task
    library_dir: Path | None = None
    formatters: Path | None = None
    """The file of the user's formatters, where the model itself is served."""


def prepare(configuration: Configuration, model_dir: Path) -> Prepared:
    """Fetches and installs what has to be.

    Raises ConfigurationError for what would otherwise fail later, in a process.
    """
    options = configuration.options
    handler = find_handler(configuration, model_dir)
    if handler is None:
        path = resolve_model_dir(configuration, model_dir)
        task = choose_task(path, options)
        if task.kind == "generation":
            tokenizer_file(path)
            load_chat_template(path, options.chat_template)
        return _with_formatters(configuration, model_dir, Prepared(path, task))
    task = handler_task(configuration, handler, _model_id(configuration, model_dir))
    return Prepared(handler.parent, task, _library_dir(configuration, handler))


def _with_formatters(configuration: Configuration, model_dir: Path, model: Prepared) -> Prepared:
    path = find_formatters(configuration, model_dir)
    if path is None:
        return model
    _check_formatted(configuration, path, model.task)
    library_dir = _library_dir(configuration, path)
    # In a process of its own: this one has nothing to do with the user's code.
    command = [
        sys.executable,
        "-m",
        "container.apis.generation.formatters",
        str(path),
        str(library_dir or ""),
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise ConfigurationError(done.stderr.strip())
    return replace(model, formatters=path, library_dir=library_dir)


def _check_formatted(configuration: Configuration, path: Path, task: Task) -> None:
    if task.kind != "generation":
        raise ConfigurationError(
            f"{path}: formatters are for text generation, and this is {task.name} ({task.reason}); "
            "write handle(inputs)"
        )
    if configuration.handler_options:
        raise ConfigurationError(
            f"unknown option.{next(iter(configuration.handler_options))}: only handle(inputs) "
            f"gets options of its own, and {path} has none"
        )


def _library_dir(configuration: Configuration, code: Path) -> Path | None:
    if not configuration.options.install_requirements:
        return None
    return installed_requirements(code.parent / "requirements.txt")


def handler_task(
    configuration: Configuration, handler: Path, given: Mapping[str, str] | None = None
) -> Task:
    """The task of a handler, which learns what somebody set, and `given`.

    Raises ConfigurationError as `choose_task` does.
    """
    options = configuration.options
    named = {name: format_value(getattr(options, name)) for name in configuration.sources}
    properties = {**named, **configuration.handler_options, **(given or {})}
    task = Task(
        kind="handler", name=str(handler), reason="the user's own code", properties=properties
    )
    check_options(task, options)
    return task


def expected_task(configuration: Configuration, model_dir: Path) -> Task | None:
    """The task as far as it shows without a download; raises as `prepare` does."""
    handler = find_handler(configuration, model_dir)
    if handler is not None:
        return handler_task(configuration, handler)
    path = open_model_dir(named_path(configuration, model_dir))
    is_here = (path / "config.json").is_file() or configuration.options.task is not None
    if not is_here:
        return None
    task = choose_task(path, configuration.options)
    formatters = find_formatters(configuration, model_dir)
    if formatters is not None:
        _check_formatted(configuration, formatters, task)
    return task


def _model_id(configuration: Configuration, model_dir: Path) -> Mapping[str, str]:
    """A path where it is one here, as LMI hands it on; an id of a hub as it is."""
    model_id = configuration.options.model_id
    if model_id is None:
        return {}
    if model_id.startswith("s3://"):
        return {"model_id": str(downloaded(model_id))}
    path = named_path(configuration, model_dir)
    return {"model_id": str(path.resolve()) if path.exists() else model_id}
