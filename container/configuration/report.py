"""What the container says of itself: the table of options, the start-up banner, the facts."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from container.configuration.resolve import Configuration
from core.errors import ConfigurationError
from core.messages import Facts
from core.options import Option, Value, option_table
from core.task import Task, choose_batching_of

REFUSAL = "longshore: "
"""Begins every line that says why nothing is served."""


def help_lines() -> Iterator[str]:
    """Every option with its type, default and meaning."""
    for row in option_table().values():
        yield f"  {row.key} ({row.kind_text}; default {format_value(row.default)})"
        yield from textwrap.wrap(row.doc, 90, initial_indent=" " * 6, subsequent_indent=" " * 6)


def explain_lines(configuration: Configuration, model: str, task: Task | None) -> Iterator[str]:
    """Every effective option with its source, task and strategy and why, the warnings."""
    yield from _options(configuration, list(option_table().values()))
    yield from _choice(configuration, model, task)


def banner_lines(
    configuration: Configuration, model: str, address: str, task: Task
) -> Iterator[str]:
    """What is known before the model loads: the options that somebody set, task and strategy."""
    yield f"Longshore on {address}; configuration: {_origin(configuration)}"
    rows = [row for row in option_table().values() if row.name in configuration.sources]
    yield from _options(configuration, rows)
    yield from _choice(configuration, model, task)


def facts_lines(facts: Facts) -> Iterator[str]:
    """What the engine decided: the layout, the limits and the memory budget."""
    yield f"ready: {facts.model} ({facts.architecture}) loaded in {facts.load_seconds:.1f} s"
    if facts.phases:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts.phases.items())
        yield f"  start: {phases}"
    yield f"  layout: 1 copy x 1 rank on {facts.device}{facts.dtype and ', '}{facts.dtype}"
    yield f"  batching: {facts.batching} ({facts.batching_reason})"
    if facts.executor == "task":
        yield f"  task: {facts.task} ({facts.executor_reason})"
        yield from _task_limits(facts)
    else:
        yield f"  executor: {facts.executor} ({facts.executor_reason})"
        if facts.decoder:
            yield f"  decoder: {facts.decoder}"
        yield from _limits(facts)
    yield from (f"  note: {note}" for note in facts.notes)


def _task_limits(facts: Facts) -> Iterator[str]:
    length = f"{facts.max_model_len} tokens a text, " if facts.max_model_len else ""
    yield f"  limits: {length}{facts.max_sequences} requests at once"
    if facts.weights_bytes:
        yield f"  memory: weights {_mebibytes(facts.weights_bytes)}, and what the task needs"


def _limits(facts: Facts) -> Iterator[str]:
    limits = f"  limits: {facts.max_model_len} tokens a sequence, {facts.max_sequences} at once"
    memory = f"  memory: weights {_mebibytes(facts.weights_bytes)}"
    if facts.activation_bytes:
        memory += f", steps {_mebibytes(facts.activation_bytes)}"
    if facts.executor == "library":
        yield limits
        yield f"{memory}; generate takes what else it needs"
        return
    yield f"{limits}, {facts.max_step_tokens} tokens a step"
    yield (
        f"{memory}, KV {_mebibytes(facts.kv_bytes)} = "
        f"{facts.num_kv_blocks} blocks of {facts.block_size} tokens in {facts.kv_dtype}"
    )


def refuse(error: ConfigurationError) -> int:
    """Says on stderr why nothing is served; the exit code."""
    for line in str(error).splitlines():
        print(f"{REFUSAL}{line}", file=sys.stderr)
    return error.exit_code


def markdown_lines() -> Iterator[str]:
    """docs/configuration.md."""
    yield "# Configuration"
    yield ""
    yield "Every key of `serving.properties`. Made from `core/options.py` by `make docs`."
    yield ""
    yield "| key | values | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for row in option_table().values():
        default = "" if row.default is None else f"`{format_value(row.default)}`"
        yield f"| `{row.key}` | {row.kind_text} | {default} | {row.doc} |"


def format_value(value: Value) -> str:
    """A value as serving.properties spells it."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(configuration: Configuration, rows: list[Option]) -> Iterator[str]:
    texts = [f"{row.key}={format_value(getattr(configuration.options, row.name))}" for row in rows]
    width = max(map(len, texts), default=0)
    for row, text in zip(rows, texts, strict=True):
        yield f"  {text:<{width}}  {configuration.sources.get(row.name, 'default')}"


def _choice(configuration: Configuration, model: str, task: Task | None) -> Iterator[str]:
    if task is not None:
        yield f"  task: {task.name} ({task.reason})"
    choice = choose_batching_of(task or Task(), configuration.options)
    yield f"  batching: {choice.name or 'follows from the model'} ({choice.reason})"
    yield f"  model: {model}"
    yield from (f"  warning: {warning}" for warning in configuration.warnings)


def _origin(configuration: Configuration) -> str:
    path: Path | None = configuration.properties_path
    return str(path) if path else "no serving.properties, defaults and environment"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
