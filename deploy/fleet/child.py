"""Runs the processes of a replica on one node.

`python -m deploy.fleet.child serve PARENT PROPERTIES CPUS NODES ADDRESS SOCKET`: its container.
`python -m deploy.fleet.child join PARENT PROPERTIES CPUS NODES ADDRESS`: the ranks on another node.

PARENT is the id of the process that starts this one; this process ends when the parent ends. NODES
is the number of nodes that the replica takes. If it is above 1, ranks meet at ADDRESS.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from container.configuration.report import report_error
from container.configuration.resolve import Configuration, load_configuration
from container.launch.join import join
from container.launch.preparation import prepare
from container.launch.supervisor import supervise
from container.models.directory import default_model_dir, open_model_dir, resolve_model_dir
from core.configuration.layout import layout_here
from core.configuration.options import Options
from core.errors import ConfigurationError
from core.process.internal_arguments import internal_arguments
from core.process.processes import die_with_parent


def threads_of_a_rank(options: Options, cpus: float, variables: Mapping[str, str]) -> str:
    """Return OMP_NUM_THREADS for one of the ranks that share the cores of a replica on a node.

    variables: the environment. Its OMP_NUM_THREADS can lower the number, but not raise it: unless
    the user sets it, Ray sets it to the cores of the whole replica.
    """
    layout = layout_here(options, variables)
    share = max(1, int(cpus) // (layout.num_copies * layout.num_local_ranks))
    given = variables.get("OMP_NUM_THREADS", "")
    return str(max(1, min(share, int(given))) if given.isdecimal() else share)


def main(
    command: str, parent: str, properties: str, cpus: str, nodes: str, address: str, *socket: str
) -> int:
    """Serve or join until SIGTERM. Return the exit code, as `serve` and `join` do."""
    die_with_parent(int(parent))
    try:
        configuration = load_configuration(Path(properties), os.environ)
        if address:
            configuration = _on_nodes(configuration, int(nodes), address)
        options = configuration.options
        os.environ["OMP_NUM_THREADS"] = threads_of_a_rank(options, float(cpus), os.environ)
        if command == "join":
            return _join(configuration)
        prepared = prepare(configuration, open_model_dir(default_model_dir()))
        return supervise(configuration, prepared, 0, socket=Path(*socket))
    except ConfigurationError as error:
        return report_error(error)


def _join(configuration: Configuration) -> int:
    path = resolve_model_dir(configuration, open_model_dir(default_model_dir()))
    return join(configuration.options, path.absolute(), os.environ)


def _on_nodes(configuration: Configuration, nodes: int, address: str) -> Configuration:
    """Return the configuration of a replica whose ranks, on several nodes, meet at `address`."""
    options = dataclasses.replace(configuration.options, nodes=nodes, rank_address=address)
    return dataclasses.replace(configuration, options=options)


if __name__ == "__main__":
    description = "A replica's processes on one node. A fleet's actors on that node start it."
    both = "PARENT:int PROPERTIES CPUS:float NODES:int ADDRESS"
    forms = (f"serve {both} SOCKET", f"join {both}")
    sys.exit(main(*internal_arguments("deploy.fleet.child", description, *forms)))
