"""The command line: `serve`; answer a `batch`; `explain` the configuration; `plan` the memory."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from container.capacity.decoder import decoder_from_directory, decoder_from_hub
from container.capacity.instances import find_instance
from container.capacity.plan import Request, plan_lines
from container.configuration.environment import sets_model_id
from container.configuration.report import explain_lines, help_lines, report_error
from container.configuration.resolve import Configuration, load_configuration
from container.launch.ports import require_free_port
from container.launch.preparation import expected_task, prepare
from container.models.directory import (
    configured_model_path,
    default_model_dir,
    describe_model,
    find_properties,
    open_model_dir,
)
from container.multi_model.store import store_entries
from core.errors import ConfigurationError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command == "batch":
            return _batch(parsed)
        models = _initial_models(parsed)
        if models is not None and parsed.command != "plan":
            return _run_multi_model(parsed, models)
        model_dir = open_model_dir(parsed.model_dir or default_model_dir())
        path = parsed.properties or find_properties(model_dir)
        configuration = load_configuration(path, os.environ)
        if parsed.command == "explain":
            return _explain(configuration, model_dir)
        if parsed.command == "plan":
            return _plan(parsed, configuration, model_dir)
        return serve_model(configuration, model_dir, _port(parsed.port))
    except ConfigurationError as error:
        return report_error(error)


def serve() -> int:
    """Run `serve` with the arguments of this process: the console script `serve`."""
    return main(["serve", *sys.argv[1:]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m container", description="Serves a language model over HTTP."
    )
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
            description=text,
            epilog=_option_help(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_options(command)
        if name == "plan":
            _add_plan_options(command)
        if name == "batch":
            _add_batch_options(command)
    return parser


def _option_help() -> str:
    # argparse expands % in the epilog.
    return "\n".join(["keys in serving.properties:", *help_lines()]).replace("%", "%%")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port", type=int, help="TCP port (default: SAGEMAKER_BIND_TO_PORT, else 8080)"
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
        help="model directory or archive (default: /opt/ml/model, else the demo model)",
    )


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--instance-type", required=True, metavar="TYPE", help="such as ml.g5.2xlarge"
    )
    parser.add_argument(
        "--model-id", metavar="ID", help="model on the Hugging Face hub, instead of a directory"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, help="prompt length of a typical request"
    )
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens that it generates")


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", type=Path, required=True, metavar="FILE", help="requests, a JSON object a line"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="outcomes are appended to it; requests that it has outcomes of are skipped",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=256,
        metavar="N",
        help="requests that are sent at a time (default: 256)",
    )


def _batch(parsed: argparse.Namespace) -> int:
    from container.batch.batch import batch  # lazy: only a batch needs gevent here

    return batch(
        parsed.input, parsed.output, parsed.model_dir, parsed.properties, parsed.concurrency
    )


def _initial_models(parsed: argparse.Namespace) -> Mapping[str, Path] | None:
    """Return the models that a multi-model container loads at start; None for a single model."""
    is_endpoint = os.environ.get("SAGEMAKER_MULTI_MODEL", "").strip().lower() == "true"
    names_model = parsed.properties is not None or sets_model_id(os.environ)
    if is_endpoint and names_model:
        raise ConfigurationError(
            "SAGEMAKER_MULTI_MODEL=true serves the models that POST /models loads, each with its "
            "own serving.properties; do not set HF_MODEL_ID, OPTION_MODEL_ID or --properties"
        )
    directory = parsed.model_dir or (None if is_endpoint else default_model_dir())
    models: Mapping[str, Path] = {}
    if directory is not None and not names_model:
        models = store_entries(directory)
    return models if models or is_endpoint else None


def _port(given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get("SAGEMAKER_BIND_TO_PORT") or "8080"
    if not text.isdigit():
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
    model_id = parsed.model_id or configuration.options.model_id
    if model_id and (parsed.model_id or not directory.is_dir()):
        decoder = decoder_from_hub(model_id, configuration.options)
    else:
        decoder = decoder_from_directory(directory, configuration.options)
    request = Request(parsed.prompt_tokens, parsed.new_tokens)
    for line in plan_lines(decoder, instance, configuration.options, request):
        print(line)
    return 0


def serve_model(configuration: Configuration, model_dir: Path, port: int) -> int:
    from container.launch.supervisor import supervise  # lazy: only serve needs ZeroMQ

    require_free_port(port)  # before a download, which may take long
    return supervise(configuration, prepare(configuration, model_dir), port)


def _run_multi_model(parsed: argparse.Namespace, models: Mapping[str, Path]) -> int:
    """Run `serve` or `explain` for several models."""
    for warning in load_configuration(None, os.environ).warnings:
        print(f"warning: {warning}")
    if parsed.command == "serve":
        from container.multi_model.server import serve_models

        return serve_models(models, _port(parsed.port), os.environ)
    print(f"models: {', '.join(models) or 'only those that POST /models loads'}")
    for name, path in models.items():
        model_dir = open_model_dir(path)
        print(f"model {name}:")
        _explain(load_configuration(find_properties(model_dir), os.environ), model_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
