"""The command line's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from core.errors import ConfigurationError
from core.routing import ROUTERS

EXAMPLES = (
    "serve --replicas 2 --local-nodes 2 --properties FILE      # try it on this machine",
    "serve --replicas 8 --address auto --properties FILE       # on a running Ray cluster",
    "serve --replicas 8 --address auto --properties NEW_FILE   # a rolling update",
)
DEFAULT_PORT = 8080


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser. prog: the program's name in its help."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serves a model with containers on many machines, behind one port.",
        epilog="\n".join(["examples:", *(f"  {prog} {line}" for line in EXAMPLES)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start a fleet, or update the fleet that is running")
    place = serve.add_mutually_exclusive_group()
    _add_address(place)
    place.add_argument(
        "--local-nodes",
        type=_positive_int,
        metavar="K",
        help="start a Ray cluster of K nodes on this machine; the cluster ends with this command",
    )
    port = f"TCP port of every node (default: {DEFAULT_PORT})"
    serve.add_argument("--port", type=_port, help=port)
    _add_scale(serve)
    _add_limits(serve)
    _add_address(
        commands.add_parser(
            "stop", help="end the fleet, after giving running requests time to finish"
        )
    )
    return parser


def parse_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of `serve` that say what to deploy. Flags that say where are not allowed.

    Raises ConfigurationError for an invalid or unknown flag.
    """
    parser = _RaisingParser(add_help=False, allow_abbrev=False)
    _add_scale(parser)
    _add_limits(parser)
    return parser.parse_args(flags)


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"flags: {message}")


def _add_address(parser: argparse._ActionsContainer) -> None:  # pyright: ignore[reportPrivateUsage]
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of a Ray cluster (default: auto, the one that `ray` finds)",
    )


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--properties",
        type=Path,
        required=True,
        metavar="FILE",
        help="the serving.properties of all replicas; the file has the same path on every node",
    )
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument(
        "--replicas",
        type=_positive_int,
        default=1,
        metavar="N",
        help="number of containers (default: 1)",
    )
    scale.add_argument(
        "--autoscale",
        type=parse_range,
        metavar="MIN:MAX",
        help="run from MIN to MAX containers, as many as the unfinished requests need: "
        "one container "
        "for every option.copies × option.max_rolling_batch_size requests",
    )
    parser.add_argument(
        "--cpus",
        type=_positive_float,
        default=1.0,
        metavar="N",
        help="CPU cores of a replica, on each of its nodes if it has several (default: 1); "
        "option.tensor_parallel_degree and option.copies determine its GPUs",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace",
        type=_positive_float,
        default=30.0,
        metavar="S",
        help="seconds that requests have to finish on a replica that is stopped (default: 30)",
    )
    parser.add_argument(
        "--surge",
        type=int,
        choices=range(101),
        default=25,
        metavar="PERCENT",
        help="additional replicas that an update starts, in percent, rounded up (default: "
        "25); they "
        "need free cores and GPUs. With 0, old replicas stop before new ones start",
    )
    parser.add_argument(
        "--router",
        choices=ROUTERS,
        default="prefix-aware",
        help="how to choose a replica for a request: prefix-aware by session, prompt "
        "prefix and load; "
        "least-loaded by load alone; round-robin in turn (default: %(default)s)",
    )


def parse_range(text: str) -> tuple[int, int]:
    """Parse MIN:MAX. Raises ConfigurationError."""
    minimum, _, maximum = text.partition(":")
    if not (minimum.isdecimal() and maximum.isdecimal() and 1 <= int(minimum) <= int(maximum)):
        raise ConfigurationError(
            f"--autoscale {text}: expected MIN:MAX, such as 1:4, with MIN at least 1"
        )
    return int(minimum), int(maximum)


def _port(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number}: must be 1 to 65535")
    return number


def _positive_int(text: str) -> int:
    return int(_positive(int(text)))


def _positive_float(text: str) -> float:
    return _positive(float(text))


def _positive(value: float) -> float:
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value:g}: must be above 0")
    return value
