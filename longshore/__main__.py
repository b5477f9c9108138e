"""The command `longshore`: a table of commands, each with a parser and help of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.process.processes import until_stopped

NAME = "longshore"
EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141
"""As if SIGPIPE had ended the process."""


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table."""

    doc: str
    run: Callable[[list[str]], int | None]
    """Takes the arguments after `longshore`, of which the first is the command's name."""
    extra: str = ""
    """The extra of this distribution that the command needs; empty if it needs none."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    match given:
        case ["-h" | "--help", *_]:
            print(*_help_lines(), sep="\n")
        case ["--version", *_]:
            import importlib.metadata  # lazy, as all imports that `serve` does not need

            print(NAME, importlib.metadata.version(NAME))
        case [name, *_] if name in COMMANDS:
            return _run(COMMANDS[name], given)
        case _:
            print(*_help_lines(), sep="\n", file=sys.stderr)
            if given:
                import difflib

                near = difflib.get_close_matches(given[0], COMMANDS, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                print(f"\n{NAME}: no command {given[0]!r}{hint}", file=sys.stderr)
            return EXIT_USAGE
    return 0


def serve() -> int:
    """Run `longshore serve`, for the console script `serve`, which SageMaker's images have."""
    return main(["serve", *sys.argv[1:]])


def _run(command: Command, arguments: list[str]) -> int:
    try:
        code = command.run(arguments) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # such as `longshore explain | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except ModuleNotFoundError as error:
        if not command.extra:
            raise
        print(
            f"{NAME} {arguments[0]}: {error.name} is not installed; run: "
            f"pip install '{NAME}[{command.extra}]'",
            file=sys.stderr,
        )
        return 1


# Each function below imports its command only when it is called, so that `longshore --help` and the
# other commands do not wait for the import.
def _container(arguments: list[str]) -> int:
    from container.__main__ import main as run

    return run(arguments, NAME)


def _server(arguments: list[str]) -> int:
    return until_stopped(lambda: _container(arguments))


def _compare(arguments: list[str]) -> int:
    from loadtest.__main__ import main as run

    return run(arguments, NAME)


def _load(arguments: list[str]) -> int:
    from loadtest.__main__ import main as run

    return run(arguments[1:], f"{NAME} load")


def _replay(arguments: list[str]) -> int:
    from benchmarks.replay.__main__ import main as run

    return run(arguments[1:], f"{NAME} replay")


def _advise(arguments: list[str]) -> int:
    from benchmarks.advise.__main__ import main as run

    return run(arguments[1:], f"{NAME} advise")


def _deploy(arguments: list[str]) -> int:
    from deploy.__main__ import main as run

    return run(arguments[1:], f"{NAME} deploy")


def _fleet(arguments: list[str]) -> int:
    from deploy.fleet.__main__ import main as run

    return run(arguments[1:], f"{NAME} fleet")


COMMANDS = {
    "serve": Command("serve a model over HTTP", _server),
    "explain": Command(
        "show the strategy, and every option with the place that sets it", _container
    ),
    "batch": Command("answer all requests of a file", _container),
    "verify": Command("compute logged answers again, and compare them bit by bit", _container),
    "plan": Command("estimate how many requests fit into an instance's GPU memory", _container),
    "compare": Command("load-test all strategies, and write a report", _compare, "loadtest"),
    "load": Command("load-test any server, or draw the report again", _load, "loadtest"),
    "replay": Command("run a recording again, or with another strategy", _replay),
    "advise": Command("find better options for what was recorded", _advise),
    "fleet": Command("serve a model on many machines, with Ray", _fleet, "ray"),
    "deploy": Command("deploy to SageMaker, and remove everything again", _deploy, "aws"),
}


def _help_lines() -> list[str]:
    return [
        f"usage: {NAME} COMMAND ...",
        "",
        "A serving container for language models. The batching strategy is an option.",
        "",
        "commands:",
        *(f"  {name:10}{command.doc}" for name, command in COMMANDS.items()),
        "",
        "examples:",
        f"  {NAME} serve                                   # the demo model, on port 8080",
        f"  {NAME} serve DIR --batching continuous         # a model from a directory",
        f"  {NAME} explain DIR                             # what `serve` would do",
        f"  {NAME} compare --users 8 --requests 40         # all strategies, with the demo model",
        "",
        f"{NAME} COMMAND --help shows the options of a command, {NAME} --version the version.",
    ]


if __name__ == "__main__":
    sys.exit(main())
