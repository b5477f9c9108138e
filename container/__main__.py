"""The command line: `serve`, `batch`, `verify`, `explain` and `plan`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from container.chosen_models import (
    OneModel,
    add_model_options,
    chosen_models,
    model_dir_of,
    one_model,
    settings_of,
)
from container.configuration.flags import add_flags
from container.configuration.report import explain_lines, report_error
from container.configuration.resolve import Configuration, load_configuration
from container.launch.ports import require_free_port
from container.launch.preparation import expected_task, prepare
from container.model_files.directory import (
    describe_model,
    find_properties,
    model_place,
    open_model_dir,
)
from container.model_files.gguf import model_directory
from container.multi_model.strategies import Comparison, compare_strategies, read_strategies
from core.errors import ConfigurationError
from core.process.gpus import visible_gpus
from core.process.measured import lines_on


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table of commands, which is at the end of this file."""

    text: str
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code. May raise ConfigurationError."""
    add_options: Callable[[argparse.ArgumentParser], None]
    examples: Sequence[str]
    """Arguments to show in the help."""
    takes: str = ""
    """An argument after MODEL, for the usage."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m container") -> int:
    """Run a command line and return the exit code. prog: the program's name in its help."""
    parsed = _parser(prog).parse_args(arguments)
    try:
        return COMMANDS[parsed.command].run(parsed)
    except ConfigurationError as error:
        return report_error(error)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Serves a language model over HTTP.")
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        own = parsers.add_parser(
            name,
            help=command.text,
            usage=f"%(prog)s [MODEL]{command.takes} [--option VALUE ...]",
            description=command.text,
            epilog="\n".join(["examples:", *(f"  %(prog)s{line}" for line in command.examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_model_options(own)
        command.add_options(own)
        add_flags(own)
    return parser


def _serve(parsed: argparse.Namespace) -> int:
    names = None if parsed.strategies is None else read_strategies(parsed.strategies)
    models, port = chosen_models(parsed), _port(parsed.port)
    if names is None and isinstance(models, OneModel):
        return serve_model(models.configuration, models.directory, port, parsed.host)
    from container.multi_model.server import serve_models  # lazy: it needs gevent

    if not isinstance(models, OneModel):
        if names is None:
            return serve_models(models, port, os.environ, host=parsed.host)
        raise ConfigurationError(
            "--strategies serves one model several times, but this is a server of several models "
            f"({', '.join(models) or 'SAGEMAKER_MULTI_MODEL=true'}); name one with MODEL"
        )
    comparison = _comparison(models, names or (), parsed)
    entries = {name: models.path.resolve() for name in comparison.overrides}
    return serve_models(entries, port, os.environ, comparison=comparison, host=parsed.host)


def _explain(parsed: argparse.Namespace) -> int:
    models = chosen_models(parsed)
    if isinstance(models, OneModel):
        _explain_model(models.configuration, models.directory)
        return 0
    print(f"models: {', '.join(models) or 'only those that POST /models loads'}")
    for name, path in models.items():
        directory = open_model_dir(path)
        print(f"model {name}:")
        _explain_model(load_configuration(find_properties(directory), os.environ), directory)
    return 0


def _plan(parsed: argparse.Namespace) -> int:
    # Imported only here: every start of a container would wait for it.
    from container.capacity.decoder import decoder_from_directory, decoder_from_hub
    from container.capacity.draft import with_draft
    from container.capacity.estimate import TypicalRequest, plan_lines
    from container.capacity.instances import find_instance

    model = one_model(parsed, settings_of(parsed))
    options = model.configuration.options
    instance = find_instance(parsed.instance_type)
    place = model_place(model.configuration, model.directory)
    directory = model_directory(open_model_dir(place.path))
    if options.source.model_id and not directory.is_dir():
        decoder = decoder_from_hub(options.source.model_id, options)
    else:
        decoder = decoder_from_directory(directory, options)
    decoder = with_draft(decoder, directory, options)
    request = TypicalRequest(parsed.prompt_tokens, parsed.new_tokens)
    for line in plan_lines(decoder, instance, options, request):
        print(line)
    return 0


def _batch(parsed: argparse.Namespace) -> int:
    from container.batch.batch import batch  # lazy: only a batch needs gevent here

    model_dir, flags = model_dir_of(parsed), settings_of(parsed)
    return batch(
        parsed.input, parsed.output, model_dir, parsed.properties, flags, parsed.concurrency
    )


def _verify(parsed: argparse.Namespace) -> int:
    from container.verify.verify import verify  # lazy: it needs gevent

    return verify(parsed.answers, model_dir_of(parsed), parsed.properties, settings_of(parsed))


def _port(given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get("SAGEMAKER_BIND_TO_PORT") or "8080"
    if not text.isdecimal():
        raise ConfigurationError(f"SAGEMAKER_BIND_TO_PORT={text}: expected a port number")
    return int(text)


def _explain_model(configuration: Configuration, model_dir: Path) -> None:
    task = expected_task(configuration, model_dir)
    if task is not None and task.kind == "handler":
        model = task.name
    else:
        model = describe_model(model_place(configuration, model_dir))
    for line in explain_lines(configuration, model, task):
        print(line)
    if configuration.options.speculation.chosen[0] is not None:
        path = model_directory(open_model_dir(model_place(configuration, model_dir).path))
        for line in lines_on(path):
            print(f"  {line}")


def serve_model(configuration: Configuration, model_dir: Path, port: int, host: str = "") -> int:
    from container.launch.supervisor import supervise  # lazy: only serve needs ZeroMQ

    require_free_port(port, host)  # before a download, which may take long
    return supervise(configuration, prepare(configuration, model_dir), port, host=host)


def _comparison(model: OneModel, names: Sequence[str], parsed: argparse.Namespace) -> Comparison:
    """Return the settings of each strategy for --strategies."""
    gpus, flags = visible_gpus(os.environ), settings_of(parsed)
    comparison = compare_strategies(names, model.configuration, parsed.properties, flags, gpus)
    task = expected_task(model.configuration, model.directory)
    if task is not None and task.kind != "generation":
        raise ConfigurationError(
            f"--strategies is for text generation, but the task is {task.name} ({task.reason}); "
            "serve it with --batching"
        )
    return comparison


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port", type=int, help="TCP port (default: SAGEMAKER_BIND_TO_PORT, else 8080)"
    )
    parser.add_argument(
        "--host",
        default="",
        metavar="ADDRESS",
        help="IP address to listen on, such as 127.0.0.1 or :: (default: all addresses, of "
        "IPv4 and IPv6)",
    )
    parser.add_argument(
        "--strategies",
        metavar="LIST",
        help="all, or a list such as none,paged: serve the model with each of these "
        "batching strategies at the same time; the page at / shows them side by side, and "
        "each has its API below /models/STRATEGY/",
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


def _add_verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "answers",
        type=Path,
        metavar="ANSWERS",
        help="file with an answer as JSON, or with one on each line (docs/same-bits.md). Exit "
        "code 0: all are equal, 1: one differs, 2: one cannot be computed here",
    )


COMMANDS = {
    "serve": Command(
        "start the container",
        _serve,
        _add_serve_options,
        (
            "                                    # /opt/ml/model if it exists, else the demo model",
            " DIR --port 8081                    # with the serving.properties in it",
            " org/name --batching continuous     # from the Hugging Face hub",
            " --properties FILE                  # the model is FILE's option.model_id",
            " DIR --strategies all               # all strategies side by side on one page",
        ),
    ),
    "batch": Command(
        "answer all requests of a file in OpenAI's batch format",
        _batch,
        _add_batch_options,
        (
            " --input requests.jsonl --output answers.jsonl",
            " DIR --input requests.jsonl --output answers.jsonl --batching continuous",
        ),
    ),
    "verify": Command(
        "compute logged answers again, and say at which token they differ",
        _verify,
        _add_verify_options,
        (" DIR answer.json", " --properties FILE answers.jsonl"),
        takes=" ANSWERS",
    ),
    "explain": Command(
        "print all effective options with their sources, and the batching strategy",
        _explain,
        lambda parser: None,
        (" DIR", " --properties FILE --batching dynamic"),
    ),
    "plan": Command(
        "estimate how many requests fit into an instance's GPU memory",
        _plan,
        _add_plan_options,
        (
            " org/name --instance-type ml.g5.2xlarge",
            " DIR --instance-type ml.g6e.xlarge --prompt-tokens 2000 --batching paged",
        ),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
