"""`python -m deploy up | invoke | stream | status | logs | compare | down | image`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deploy.sagemaker.command_line import make_parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m deploy") -> int:
    """Run a command line and return the exit code. prog: the program's name in its help.

    Raises ModuleNotFoundError if boto3 is not installed.
    """
    parsed = make_parser(prog).parse_args(arguments)
    from deploy.sagemaker.commands import run  # lazy: the help needs no boto3

    return run(parsed)


if __name__ == "__main__":
    sys.exit(main())
