"""A Ray cluster of several nodes on this machine, to try a fleet."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ray.cluster_utils import Cluster

from core.process.names import import_root

HEALTH_CHECK_PERIOD_MS = 1000
"""How often Ray's head checks a node. It gives the node up after five failed checks."""
_OBJECT_STORE_BYTES = 80 * 2**20
"""Object store of each node. Only requests and response pieces above 100 KB need it."""


@contextmanager
def local_cluster(num_nodes: int, cpus: int) -> Iterator[str]:
    """Start a cluster and yield its address. cpus: CPUs of each node.

    The CPUs are counted, not enforced: all nodes share this machine's cores.
    """
    _let_workers_import()
    arguments = {
        "num_cpus": cpus,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    settings = {"health_check_period_ms": HEALTH_CHECK_PERIOD_MS}
    head_arguments = {**arguments, "_system_config": settings}
    cluster = Cluster(initialize_head=True, head_node_args=head_arguments)
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(**arguments)
        yield cluster.address
    finally:
        cluster.shutdown()


def _let_workers_import() -> None:
    """Let Ray's processes import our modules, even from a checkout, and send no statistics."""
    paths = [str(import_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # A trial on one machine sends Ray no usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
