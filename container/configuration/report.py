"""Formats the options, the start-up banner and the engine's facts as lines of text."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Container, Iterator
from pathlib import Path

from container.configuration.lmi import ADVICE
from container.configuration.resolve import Configuration
from core.configuration.batching import Choice
from core.configuration.layout import extent, layout_here, whose_memory
from core.configuration.limits import LIMITS, Limit, OptionLimit
from core.configuration.options import Options, option_table
from core.configuration.record import Option, Value
from core.configuration.strategy_table import STRATEGIES
from core.configuration.task import Task, choose_batching_of
from core.errors import ConfigurationError
from core.protocol.facts import Facts
from core.protocol.launch import Launch

ERROR_PREFIX = "longshore: "
"""Starts every line of a configuration error on stderr."""


def explain_lines(configuration: Configuration, model: str, task: Task | None) -> Iterator[str]:
    """Yield the strategy, the task, the model, the warnings, the layout and all options.

    The layout is that of this machine, and is shown only if there are several copies. Each option
    is shown with its source; those that are set come before the others.
    """
    yield from _strategy_lines(configuration, model, task)
    if configuration.options.layout.copies > 1:
        yield from _layout_lines(configuration.options)
    given = _given_options(configuration.sources)
    yield from _option_lines(configuration, given)
    yield "  all others:"
    others = [option for option in option_table().values() if option not in given]
    yield from _option_lines(configuration, others)


def banner_lines(
    configuration: Configuration, model: str, address: str, task: Task
) -> Iterator[str]:
    """Yield the facts known before the model loads: the options set, the task and the strategy."""
    yield f"Longshore on {address}; configuration: {_source(configuration.properties_path)}"
    yield from _option_lines(configuration, _given_options(configuration.sources))
    yield from _strategy_lines(configuration, model, task)


def _given_options(names: Container[str]) -> list[Option]:
    return [option for option in option_table().values() if option.name in names]


def facts_lines(facts: Facts, num_copies: int = 1) -> Iterator[str]:
    """Yield the values that an engine resolved: the layout, the limits and the memory budget.

    num_copies: copies of the model, each with such an engine.
    """
    yield f"ready: {facts.model} ({facts.architecture}) loaded in {facts.load_seconds:.1f} s"
    size = extent(facts, num_copies)
    yield f"  layout: {size} on {facts.device}{facts.dtype and ', '}{facts.dtype}"
    yield f"  batching: {facts.batching} ({facts.batching_reason})"
    if facts.executor == "task":
        yield f"  task: {facts.task} ({facts.executor_reason})"
        if facts.encoder:
            yield f"  encoder: {facts.encoder}"
        yield from _task_limit_lines(facts)
    else:
        yield f"  executor: {facts.executor} ({facts.executor_reason})"
        if facts.decoder:
            yield f"  decoder: {facts.decoder}"
        yield from _limit_lines(facts)
    if facts.digest:
        yield f"  digest: {facts.digest}"
    yield from (f"  note: {note}" for note in facts.notes)


def listening_line(launch: Launch) -> str:
    """Return the last line of a start: where to send requests."""
    if launch.socket:
        return f"listening on {launch.socket}"
    scheme = "https" if launch.options.server.ssl_certfile else "http"
    return f"listening on {scheme}://{url_host(launch.host)}:{launch.port}"


def url_host(host: str) -> str:
    """Return the host of the URL of a server that listens on the address `host`, or on all."""
    if not host or ipaddress.ip_address(host).is_unspecified:
        return "localhost"
    return f"[{host}]" if ":" in host else host


def _task_limit_lines(facts: Facts) -> Iterator[str]:
    length = f"{facts.max_model_len} tokens per text, " if facts.max_model_len else ""
    yield f"  limits: {length}{facts.max_sequences} requests at once"
    if facts.weights_bytes:
        yield f"  memory: weights {_mebibytes(facts.weights_bytes)}, plus what the task needs"


def _limit_lines(facts: Facts) -> Iterator[str]:
    limits = (
        f"  limits: {facts.max_model_len} tokens per sequence, batches of {facts.max_sequences}"
    )
    memory = f"  {whose_memory(facts)}: weights {_mebibytes(facts.weights_bytes)}"
    if facts.quantization:
        per_weight = facts.weights_bytes / facts.num_weights
        memory += f" in {facts.quantization} ({per_weight:.2f} bytes per weight)"
    if facts.activation_bytes:
        memory += f", steps {_mebibytes(facts.activation_bytes)}"
    if facts.executor == "library":
        yield limits
        yield f"{memory}; generate allocates more as needed"
        return
    yield f"{limits}, {facts.max_step_tokens} tokens per step"
    yield (
        f"{memory}, KV {_mebibytes(facts.kv_bytes)} = "
        f"{facts.num_kv_blocks} blocks of {facts.block_size} tokens in {facts.kv_dtype}"
    )


def report_error(error: ConfigurationError) -> int:
    """Print a configuration error on stderr and return its exit code."""
    for line in str(error).splitlines():
        print(f"{ERROR_PREFIX}{line}", file=sys.stderr)
    return error.exit_code


def markdown_lines() -> Iterator[str]:
    """Yield the lines of docs/reference/configuration.md."""
    yield "# Configuration"
    yield ""
    yield "This table lists every key of `serving.properties`. `make docs` generates it from"
    yield "`core/configuration/options.py`. Some meanings begin with a name and a colon. Such an"
    yield "option has an effect only with that strategy, executor, task or device, or together"
    yield "with that other option. Elsewhere in a meaning, a value and a colon say what this value"
    yield "selects."
    yield ""
    yield "| key | values | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for option in option_table().values():
        default = "" if option.default is None else f"`{format_value(option.default)}`"
        yield f"| `{option.key}` | {option.kind_text} | {default} | {option.doc} |"
    yield ""
    yield "## LMI's keys without effect"
    yield ""
    yield "A file with these keys works. Each of these keys causes a warning at start, with the"
    yield "advice in the table, which is generated from `container/configuration/lmi.py`."
    yield ""
    yield "| key | advice |"
    yield "| --- | --- |"
    yield from (f"| `{key}` | {advice} |" for key, advice in ADVICE.items())


def format_value(value: Value) -> str:
    """Return a value as it is written in serving.properties."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _option_lines(configuration: Configuration, options: list[Option]) -> Iterator[str]:
    texts = [
        f"{option.key}={format_value(configuration.options.of(option.name))}" for option in options
    ]
    width = max(map(len, texts), default=0)
    for option, text in zip(options, texts, strict=True):
        yield f"  {text:<{width}}  {configuration.sources.get(option.name, 'default')}"


def _layout_lines(options: Options) -> Iterator[str]:
    try:
        yield from layout_here(options).lines()
    except ConfigurationError as error:
        yield f"  warning: {error}"


def _strategy_lines(configuration: Configuration, model: str, task: Task | None) -> Iterator[str]:
    choice = choose_batching_of(task or Task(), configuration.options)
    yield f"  batching: {choice.name or 'chosen once the model is known'} ({choice.reason})"
    if task is not None:
        yield f"  task: {task.name} ({task.reason})"
    yield f"  model: {model}"
    warnings = (*configuration.warnings, *_ineffective_limits(configuration, choice))
    yield from (f"  warning: {warning}" for warning in warnings)


def _ineffective_limits(configuration: Configuration, choice: Choice) -> Iterator[str]:
    """Yield a warning for a limit of the batch that the strategy does not read."""
    if choice.name is None:
        return
    used = STRATEGIES[choice.name].limit_option
    options = configuration.options
    for name, is_set in (
        ("batch_size", options.strategy.batch_size is not None and options.strategy.batch_size > 1),
        ("max_rolling_batch_size", "max_rolling_batch_size" in configuration.sources),
    ):
        if is_set and name != used:
            instead = f"; its limit is {option_table()[used].key}" if used else ""
            yield f"{option_table()[name].key} has no effect with {choice.name}{instead}"


def _source(properties: Path | None) -> str:
    return str(properties or "no serving.properties; defaults and environment variables")


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def limit_lines() -> list[str]:
    """Return docs/reference/limits.md."""
    return [
        "# Limits",
        "",
        "This table lists the limits on one request. They keep one request from harming the "
        "others. A request beyond a limit gets the status in the table. The table is generated "
        "from `core/configuration/limits.py` by `make docs`.",
        "",
        "| what is limited | limit or its default | option that sets it | status | why |",
        "| --- | --- | --- | --- | --- |",
        *map(_limit_row, LIMITS),
        "",
        "Status 200 means that the response has already begun, so the server cuts it off. With "
        "`option.overload_status=429`, a request beyond a limit with status 503 gets 429 instead, "
        "unless it is beyond the limit on connections. Both statuses come with a `Retry-After` "
        "header.",
        "",
        "Status 101 marks a limit of [WebSockets](../requests.md#bidirectional-streams). The "
        "server closes a WebSocket with code 1008 if it is idle for too long, or if a message does "
        "not arrive in time. It closes a WebSocket with code 1009 if a message is too large.",
    ]


def _limit_row(limit: Limit | OptionLimit) -> str:
    if isinstance(limit, Limit):
        size, key = f"{limit.maximum:,} {limit.unit}", ""
    else:
        option = option_table()[limit.option]
        size, key = f"{option.default:,} {limit.unit}", f"`{option.key}`"
    return f"| {limit.quantity} | {size} | {key} | {limit.status} | {limit.reason} |"
