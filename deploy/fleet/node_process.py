"""Runs the processes of a replica on one node.

`python -m deploy.fleet.node_process serve PARENT PROPERTIES CPUS NODES ADDRESS SOCKET`:
its container.
`python -m deploy.fleet.node_process follow PARENT PROPERTIES CPUS NODES ADDRESS NODE`:
the ranks on another node, of which the container's is number 0.

PARENT is the id of the process that starts this one; this process ends when the parent ends. NODES
is the number of nodes that the replica takes. If it is above 1, the other ranks find rank 0 at
ADDRESS.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from container.configuration.report import report_error
from container.configuration.resolve import Configuration, load_configuration
from container.launch.children import Child
from container.launch.preparation import prepare
from container.launch.supervisor import supervise
from container.model_files.directory import (
    default_model_dir,
    model_place,
    open_model_dir,
    resolve_model_dir,
)
from core.configuration.layout import layout_here
from core.configuration.options import Options
from core.errors import ConfigurationError
from core.process.internal_arguments import internal_arguments
from core.process.names import python_command
from core.process.processes import die_with_parent

_POLL_INTERVAL_S = 0.1


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
    command: str, parent: str, properties: str, cpus: str, nodes: str, address: str, place: str
) -> int:
    """Serve until SIGTERM, or follow until a rank ends. Return the exit code."""
    die_with_parent(int(parent))
    try:
        configuration = load_configuration(Path(properties), os.environ)
        options = configuration.options.changed(nodes=int(nodes))
        configuration = dataclasses.replace(configuration, options=options)
        os.environ["OMP_NUM_THREADS"] = threads_of_a_rank(options, float(cpus), os.environ)
        if command == "follow":
            return _follow(configuration, address, int(place))
        prepared = prepare(configuration, open_model_dir(default_model_dir()))
        return supervise(configuration, prepared, 0, socket=Path(place), rank_address=address)
    except ConfigurationError as error:
        return report_error(error)


def _follow(configuration: Configuration, address: str, node: int) -> int:
    """Run the ranks of a node until one of them ends. Return 0 if rank 0 has ended, else 1."""
    place = model_place(configuration, open_model_dir(default_model_dir()))
    path = resolve_model_dir(place, configuration.options.model).resolve()
    layout = layout_here(configuration.options)
    children = list[Child]()
    for index in range(layout.num_local_ranks):
        rank = node * layout.num_local_ranks + index
        arguments = (address, str(rank), str(path), "--parent", str(os.getpid()))
        command = [*python_command("engine.follow"), *arguments]
        variables = layout.rank_variables(index, os.environ)
        children.append(Child(f"rank {rank}", command, variables=variables))
    while not (ended := [child for child in children if child.exit_code is not None]):
        time.sleep(_POLL_INTERVAL_S)
    for child in ended:
        print(f"{child.name} {child.describe_exit()}", file=sys.stderr, flush=True)
    for child in children:
        child.kill()
    return int(any(child.exit_code for child in ended))


if __name__ == "__main__":
    description = "A replica's processes on one node. A fleet's actors on that node start it."
    both = "PARENT:int PROPERTIES CPUS:float NODES:int ADDRESS"
    forms = (f"serve {both} SOCKET", f"follow {both} NODE:int")
    sys.exit(main(*internal_arguments("deploy.fleet.node_process", description, *forms)))
