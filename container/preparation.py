"""What is settled before a process starts: the model, the task, a handler's packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from container.configuration import Configuration
from container.handler_file import find_handler
from container.model_directory import named_path, open_model_dir, resolve_model_dir
from container.report import format_value
from container.requirements import installed_requirements
from container.s3 import downloaded
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
        return Prepared(path, task)
    task = handler_task(configuration, handler, _model_id(configuration, model_dir))
    requirements = handler.parent / "requirements.txt"
    library_dir = installed_requirements(requirements) if options.install_requirements else None
    return Prepared(handler.parent, task, library_dir)


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
    return choose_task(path, configuration.options) if is_here else None


def _model_id(configuration: Configuration, model_dir: Path) -> Mapping[str, str]:
    """A path where it is one here, as LMI hands it on; an id of a hub as it is."""
    model_id = configuration.options.model_id
    if model_id is None:
        return {}
    if model_id.startswith("s3://"):
        return {"model_id": str(downloaded(model_id))}
    path = named_path(configuration, model_dir)
    return {"model_id": str(path.resolve()) if path.exists() else model_id}
