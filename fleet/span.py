"""The nodes that a replica takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.errors import ConfigurationError
from core.layout import counted, lay_out
from core.options import Options

_ANY_CORES = 2**31
"""A container on a CPU counts its cores itself."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bundles of cores and GPUs, each on one node. Rank 0 is in the first."""

    bundles: int
    gpus: int
    """GPUs of a bundle: one for each of its ranks, of each copy."""
    is_strict: bool
    """Whether every bundle needs a node of its own, because the user has set option.nodes."""

    def placement(self, cpus: float) -> tuple[list[dict[str, float]], str]:
        """Return Ray's bundles, each with these CPUs, and the strategy to place them."""
        bundle: dict[str, float] = {"CPU": cpus, "GPU": self.gpus}
        strategy = "STRICT_SPREAD" if self.is_strict else "PACK"
        return [{name: n for name, n in bundle.items() if n}] * self.bundles, strategy

    def __str__(self) -> str:
        gpus = f" with {counted(self.gpus, 'GPU')} each" if self.gpus else ""
        if self.bundles == 1 or self.is_strict:
            return f"{counted(self.bundles, 'node')}{gpus}"
        return f"{self.bundles} parts{gpus}, on as few nodes as have room"


def span_of(options: Options, gpus_of_nodes: Sequence[int]) -> Span:
    """Return what a replica takes: one node if it can, unless option.nodes says otherwise.

    gpus_of_nodes: the GPUs of each node of the cluster. Ranks for which no node has enough are
    spread in equal parts over several nodes.

    Raises ConfigurationError if the cluster has no room for a replica.
    """
    if options.device == "cpu":
        gpus_of_nodes = [0] * len(gpus_of_nodes)
    most = max(gpus_of_nodes, default=0)
    nodes = _num_nodes(options, most)
    layout = lay_out(
        replace(options, nodes=nodes), tuple(map(str, range(most))), _ANY_CORES, "the largest node"
    )
    if most and layout.num_ranks > sum(gpus_of_nodes):
        raise ConfigurationError(
            f"option.tensor_parallel_degree={layout.num_ranks}, but the cluster has "
            f"{counted(sum(gpus_of_nodes), 'GPU')}; add nodes or lower it"
        )
    if options.nodes > len(gpus_of_nodes):
        raise ConfigurationError(
            f"option.nodes={options.nodes}, but the cluster has "
            f"{counted(len(gpus_of_nodes), 'node')}; add nodes or lower it"
        )
    gpus = layout.num_copies * layout.num_local_ranks if most else 0
    return Span(nodes, gpus, is_strict=options.nodes > 1)


def _num_nodes(options: Options, num_gpus: int) -> int:
    """Return the smallest number of nodes with this many GPUs that divides the ranks."""
    degree = options.tensor_parallel_degree or ""
    if not (degree.isdecimal() and num_gpus and options.copies == 1):
        return options.nodes
    ranks = int(degree)
    parts = (n for n in range(options.nodes, ranks + 1) if ranks % n == 0)
    return next((n for n in parts if ranks // n <= num_gpus), options.nodes)
