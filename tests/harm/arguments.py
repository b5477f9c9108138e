"""The command line of the abuse lab: `python -m tests.harm`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from loadtest.arguments import add_properties, count, names, positive


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the whole command line. prog: the program's name in its help."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Harm a container, and measure what that costs everyone else."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_harm(_adder(commands))
    _add_soak(_adder(commands))
    _add_kills(_adder(commands))
    _add_recorded(_adder(commands))
    return parser


def _adder(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> Callable[..., argparse.ArgumentParser]:
    def add(name: str, **texts: str) -> argparse.ArgumentParser:
        formatter = argparse.RawDescriptionHelpFormatter
        return commands.add_parser(name, formatter_class=formatter, **texts)

    return add


def _add_harm(add: Callable[..., argparse.ArgumentParser]) -> None:
    harm = add(
        "harm",
        help="send hostile requests and measure what they cost everyone else",
        description="Send every hostile request of tests/harm/rows.py, one after another, while "
        "ordinary streams run and /ping is requested every 25 ms. The exit code is 1 if a hostile "
        "request broke a limit.",
        epilog="examples:\n"
        "  %(prog)s                        # starts a server with the demo model\n"
        "  %(prog)s --url http://host:8080 --json harm.json\n"
        "  %(prog)s --rows grammar,schema  # rows whose name has one of these words",
    )
    harm.add_argument("--url", help="a running server (default: start one)")
    _add_own_server(harm)
    harm.add_argument(
        "--rows",
        type=names,
        default=[""],
        metavar="WORD,...",
        help="only rows whose name contains one of these words (default: all)",
    )
    harm.add_argument(
        "--max-ping",
        type=positive,
        default=250.0,
        metavar="MS",
        help="longest time that /ping may take, in ms (default: 250)",
    )
    harm.add_argument(
        "--max-row",
        type=positive,
        default=120.0,
        metavar="S",
        help="longest time that the server may take to end a row, in s (default: 120)",
    )
    harm.add_argument(
        "--streams", type=count, default=4, help="number of ordinary streams (default: 4)"
    )
    harm.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes as JSON")


def _add_soak(add: Callable[..., argparse.ArgumentParser]) -> None:
    soak = add(
        "soak",
        help="mix ordinary, impatient and hostile clients at random, and kill processes",
        description="Start a server. For --seconds, mix well-behaved clients with some that leave, "
        "stall or send garbage, and kill the server's processes at random. Then check that every "
        "request ended exactly once, and that KV memory, processes, memory, threads and open files "
        "are as they were before. The exit code is 1 if one of these checks fails.",
        epilog="examples:\n"
        "  %(prog)s --seconds 600\n"
        "  %(prog)s --seconds 60 --seed 7 --json soak.json",
    )
    _add_own_server(soak)
    soak.add_argument(
        "--seconds", type=positive, default=600.0, help="duration in seconds (default: 600)"
    )
    soak.add_argument("--seed", type=int, default=0, help="seed for everything random (default: 0)")
    soak.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")


def _add_kills(add: Callable[..., argparse.ArgumentParser]) -> None:
    text = "kill a container's processes under load, and count how the requests end"
    kills = add("kills", help=text, description=text)
    kills.add_argument("--times", type=count, default=12, help="kills in total (default: 12)")
    add_properties(kills, "serving.properties of the container (default: none)")
    kills.add_argument(
        "--model-dir", type=Path, metavar="DIR", help="passed to the container as --model-dir"
    )
    kills.add_argument(
        "--seed", type=int, default=0, help="seed for the times of the kills (default: 0)"
    )
    kills.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the containers' logs"
    )


def _add_recorded(add: Callable[..., argparse.ArgumentParser]) -> None:
    recorded = add(
        "recorded",
        help="record good traffic in each strategy, and check what the recordings say",
        description="Start a server for each strategy. For --seconds, the ordinary, leaving and "
        "stalling clients of soak send requests to all of them. Then check each recording: its "
        "replay, the law of receipts at each step, and that the causes of waits are the smallest. "
        "The exit code is 1 if one of these checks fails.",
        epilog="example:\n  %(prog)s --seconds 600 --out build/recorded",
    )
    add_properties(recorded, "further properties of the servers (default: the demo's)")
    recorded.add_argument(
        "--seconds", type=positive, default=600.0, help="duration in seconds (default: 600)"
    )
    recorded.add_argument(
        "--interval",
        type=positive,
        default=0.5,
        help="seconds between two requests of a client, at least (default: 0.5)",
    )
    recorded.add_argument("--seed", type=int, default=0, help="seed of the requests (default: 0)")
    recorded.add_argument(
        "--waits",
        type=count,
        default=100,
        help="of how many requests the causes are tried, the longest waits first (default: 100)",
    )
    recorded.add_argument(
        "--only-check", action="store_true", help="check the recordings that are in --out already"
    )
    recorded.add_argument(
        "--out", type=Path, default=Path("build/recorded"), metavar="DIR",
        help="folder for the recordings and the servers' logs (default: %(default)s)",
    )  # fmt: skip


def _add_own_server(parser: argparse.ArgumentParser) -> None:
    add_properties(parser, "serving.properties of the server that is started (default: the demo's)")
    parser.add_argument(
        "--log",
        type=Path,
        default=Path("build/harm-server.log"),
        metavar="FILE",
        help="log of that server (default: %(default)s)",
    )
