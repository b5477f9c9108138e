"""Command line: `compare` and `sweep` measure servers, `report` draws existing results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from loadtest.arguments import make_parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m loadtest") -> int:
    """Run a command line and return the exit code. prog: the program's name in its help.

    Raises ModuleNotFoundError if locust is not installed.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(prog)
    parsed = parser.parse_args(arguments)
    from loadtest.commands import run  # lazy: the help needs no locust

    return run(parser, parsed, f"{prog} {shlex.join(arguments)}")


if __name__ == "__main__":
    sys.exit(main())
