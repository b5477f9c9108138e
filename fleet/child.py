"""Runs the container of a replica: `python -m fleet.child PROPERTIES SOCKET CPUS`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from container.configuration.report import report_error
from container.configuration.resolve import load_configuration
from container.launch.preparation import prepare
from container.launch.supervisor import supervise
from container.models.directory import default_model_dir, open_model_dir
from core.errors import ConfigurationError
from core.layout import layout_here
from core.options import Options
from core.processes import die_with_parent


def threads_of_a_rank(options: Options, cpus: float, variables: Mapping[str, str]) -> str:
    """Return OMP_NUM_THREADS for one of the ranks that share the cores of a replica.

    The variable can only lower it. Ray sets it to the cores of the whole replica if it is not set.
    """
    layout = layout_here(options, variables)
    share = max(1, int(cpus) // (layout.num_copies * layout.num_ranks))
    given = variables.get("OMP_NUM_THREADS", "")
    return str(max(1, min(share, int(given))) if given.isdecimal() else share)


def main(properties: str, socket: str, cpus: str) -> int:
    """Serve on the Unix socket until SIGTERM and return the exit code, as `serve` does."""
    die_with_parent()
    try:
        configuration = load_configuration(Path(properties), os.environ)
        num_threads = threads_of_a_rank(configuration.options, float(cpus), os.environ)
        os.environ["OMP_NUM_THREADS"] = num_threads
        prepared = prepare(configuration, open_model_dir(default_model_dir()))
        return supervise(configuration, prepared, 0, socket=Path(socket))
    except ConfigurationError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
