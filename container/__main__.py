"""The command line: `serve`, `batch`, `explain` and `plan`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from container.capacity.decoder import decoder_from_directory, decoder_from_hub
from container.capacity.estimate import TypicalRequest, plan_lines
from container.capacity.instances import find_instance
from container.configuration.environment import sets_model_id
from container.configuration.flags import add_flags, read_flags
from container.configuration.properties import Setting
from container.configuration.report import explain_lines, report_error
from container.configuration.resolve import Configuration, load_configuration
from container.launch.ports import require_free_port
from container.launch.preparation import expected_task, prepare
from container.model_files.directory import (
    configured_model_path,
    default_model_dir,
    describe_model,
    find_properties,
    open_model_dir,
)
from container.multi_model.store import store_entries
from core.configuration.layout import visible_gpus
from core.errors import ConfigurationError

EXAMPLES = {
    "serve": (
        "                                    # /opt/ml/model if it exists, else the demo model",
        " DIR --port 8081                    # with the serving.properties in it",
        " org/name --batching continuous     # from the Hugging Face hub",
        " --properties FILE                  # the model is FILE's option.model_id",
        " DIR --strategies all               # all strategies side by side on one page",
    ),
    "batch": (
        " --input requests.jsonl --output answers.jsonl",
        " DIR --input requests.jsonl --output answers.jsonl --batching continuous",
    ),
    "explain": (" DIR", " --properties FILE --batching dynamic"),
    "plan": (
        " org/name --instance-type ml.g5.2xlarge",
        " DIR --instance-type ml.g6e.xlarge --prompt-tokens 2000 --batching paged",
    ),
}
"""Arguments to show in each command's help."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m container") -> int:
    """Run a command line and return the exit code. prog: the program's name in its help."""
    parsed = _parser(prog).parse_args(arguments)
    try:
        flags = [*_model_flag(parsed), *read_flags(parsed)]
        if parsed.command == "batch":
            return _batch(parsed, flags)
        models = _initial_models(parsed, flags)
        if parsed.command == "serve" and parsed.strategies is not None:
            return _serve_strategies(parsed, models, flags)
        if models is not None and parsed.command != "plan":
            return _run_multi_model(parsed, models, flags)
        model_dir = open_model_dir(_model_dir(parsed) or default_model_dir())
        path = parsed.properties or find_properties(model_dir)
        configuration = load_configuration(path, os.environ, flags)
        if parsed.command == "explain":
            return _explain(configuration, model_dir)
        if parsed.command == "plan":
            return _plan(parsed, configuration, model_dir)
        return serve_model(configuration, model_dir, _port(parsed.port), parsed.host)
    except ConfigurationError as error:
        return report_error(error)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Serves a language model over HTTP.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("serve", "start the container"),
        ("batch", "answer all requests of a file in OpenAI's batch format"),
        ("explain", "print all effective options with their sources, and the batching strategy"),
        ("plan", "estimate how many requests fit into an instance's GPU memory"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            usage="%(prog)s [MODEL] [--option VALUE ...]",
            description=text,
            epilog="\n".join(["examples:", *(f"  %(prog)s{line}" for line in EXAMPLES[name])]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _add_options(command)
        if name == "serve":
            command.add_argument(
                "--port", type=int, help="TCP port (default: SAGEMAKER_BIND_TO_PORT, else 8080)"
            )
            command.add_argument(
                "--host",
                default="",
                metavar="ADDRESS",
                help="IP address to listen on, such as 127.0.0.1 or :: (default: all addresses, of "
                "IPv4 and IPv6)",
            )
            command.add_argument(
                "--strategies",
                metavar="LIST",
                help="all, or a list such as none,paged: serve the model with each of these "
                "batching strategies at the same time; the page at / shows them side by side, and "
                "each has its API below /models/STRATEGY/",
            )
        if name == "plan":
            _add_plan_options(command)
        if name == "batch":
            _add_batch_options(command)
        add_flags(command)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="the model's directory or archive, its id on the Hugging Face hub, or its s3:// "
        "address; like all flags, it overrides the environment and serving.properties",
    )
    parser.add_argument(
        "--properties",
        type=Path,
        metavar="FILE",
        help="configuration file (default: serving.properties in the model directory)",
    )
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="model directory or archive, unless option.model_id is set (default: /opt/ml/model, "
        "else the demo model)",
    )


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--instance-type", required=True, metavar="TYPE", help="such as ml.g5.2xlarge"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=512,
        help="tokens in the prompt of a typical request (default: 512)",
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=256,
        help="tokens that such a request generates (default: 256)",
    )


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="file with the requests, one JSON object per line",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to which the outcomes are appended; requests whose outcomes are already in this "
        "file are skipped",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=256,
        metavar="N",
        help="maximum requests that run at the same time (default: 256)",
    )


def _batch(parsed: argparse.Namespace, flags: Sequence[Setting]) -> int:
    from container.batch.batch import batch  # lazy: only a batch needs gevent here

    return batch(
        parsed.input,
        parsed.output,
        _model_dir(parsed),
        parsed.properties,
        flags,
        parsed.concurrency,
    )


def _model_dir(parsed: argparse.Namespace) -> Path | None:
    """Return the local model that the command line names, or None if it names none."""
    if parsed.model is not None and Path(parsed.model).expanduser().exists():
        return Path(parsed.model).expanduser()
    return parsed.model_dir


def _model_flag(parsed: argparse.Namespace) -> list[Setting]:
    """Return the setting of option.model_id to MODEL, or an empty list if there is no need for it.

    There is no need without MODEL, or if MODEL is a local path and neither --properties nor the
    environment can name another model.
    """
    path = _model_dir(parsed)
    if parsed.model is None:
        return []
    if path is None or path == parsed.model_dir:
        return [Setting("option.model_id", parsed.model, "MODEL")]
    if parsed.properties is None and not sets_model_id(os.environ):
        return []
    return [Setting("option.model_id", str(path.absolute()), "MODEL")]


def _initial_models(
    parsed: argparse.Namespace, flags: Sequence[Setting]
) -> Mapping[str, Path] | None:
    """Return the models that a multi-model container loads at start; None for a single model."""
    is_endpoint = os.environ.get("SAGEMAKER_MULTI_MODEL", "").strip().lower() == "true"
    names_model = (
        parsed.properties is not None
        or sets_model_id(os.environ)
        or any(flag.key == "option.model_id" for flag in flags)
    )
    if is_endpoint and names_model:
        raise ConfigurationError(
            "SAGEMAKER_MULTI_MODEL=true serves the models that POST /models loads, each with its "
            "own serving.properties; do not set HF_MODEL_ID, OPTION_MODEL_ID, MODEL or --properties"
        )
    directory = _model_dir(parsed) or (None if is_endpoint else default_model_dir())
    models: Mapping[str, Path] = {}
    if directory is not None and not names_model:
        models = store_entries(directory)
    return models if models or is_endpoint else None


def _port(given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get("SAGEMAKER_BIND_TO_PORT") or "8080"
    if not text.isdecimal():
        raise ConfigurationError(f"SAGEMAKER_BIND_TO_PORT={text}: expected a port number")
    return int(text)


def _explain(configuration: Configuration, model_dir: Path) -> int:
    task = expected_task(configuration, model_dir)
    if task is not None and task.kind == "handler":
        model = task.name
    else:
        model = describe_model(configuration, model_dir)
    for line in explain_lines(configuration, model, task):
        print(line)
    return 0


def _plan(parsed: argparse.Namespace, configuration: Configuration, model_dir: Path) -> int:
    instance = find_instance(parsed.instance_type)
    directory = open_model_dir(configured_model_path(configuration, model_dir))
    model_id = configuration.options.model_id
    if model_id and not directory.is_dir():
        decoder = decoder_from_hub(model_id, configuration.options)
    else:
        decoder = decoder_from_directory(directory, configuration.options)
    request = TypicalRequest(parsed.prompt_tokens, parsed.new_tokens)
    for line in plan_lines(decoder, instance, configuration.options, request):
        print(line)
    return 0


def serve_model(configuration: Configuration, model_dir: Path, port: int, host: str = "") -> int:
    from container.launch.supervisor import supervise  # lazy: only serve needs ZeroMQ

    require_free_port(port, host)  # before a download, which may take long
    return supervise(configuration, prepare(configuration, model_dir), port, host=host)


def _serve_strategies(
    parsed: argparse.Namespace, models: Mapping[str, Path] | None, flags: Sequence[Setting]
) -> int:
    from container.multi_model.server import serve_models
    from container.multi_model.strategies import compare_strategies, read_strategies

    names = read_strategies(parsed.strategies)
    if models is not None:
        raise ConfigurationError(
            "--strategies serves one model several times, but this is a server of several models "
            f"({', '.join(models) or 'SAGEMAKER_MULTI_MODEL=true'}); name one with MODEL"
        )
    path = _model_dir(parsed) or default_model_dir()
    model_dir = open_model_dir(path)
    properties = parsed.properties or find_properties(model_dir)
    configuration = load_configuration(properties, os.environ, flags)
    gpus = visible_gpus(os.environ)
    comparison = compare_strategies(names, configuration, parsed.properties, flags, gpus)
    task = expected_task(configuration, model_dir)
    if task is not None and task.kind != "generation":
        raise ConfigurationError(
            f"--strategies is for text generation, but the task is {task.name} ({task.reason}); "
            "serve it with --batching"
        )
    entries = {name: path.resolve() for name in names}
    return serve_models(
        entries, _port(parsed.port), os.environ, comparison=comparison, host=parsed.host
    )


def _run_multi_model(
    parsed: argparse.Namespace, models: Mapping[str, Path], flags: Sequence[Setting]
) -> int:
    """Run `serve` or `explain` for several models."""
    if flags:
        raise ConfigurationError(
            f"{flags[0].source} works only for one model; with several, set {flags[0].key} in each "
            "model's serving.properties"
        )
    for warning in load_configuration(None, os.environ).warnings:
        print(f"warning: {warning}")
    if parsed.command == "serve":
        from container.multi_model.server import serve_models

        return serve_models(models, _port(parsed.port), os.environ, host=parsed.host)
    print(f"models: {', '.join(models) or 'only those that POST /models loads'}")
    for name, path in models.items():
        model_dir = open_model_dir(path)
        print(f"model {name}:")
        _explain(load_configuration(find_properties(model_dir), os.environ), model_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
