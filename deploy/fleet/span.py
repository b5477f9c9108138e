"""The nodes that a replica takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.configuration.layout import lay_out, quantity
from core.configuration.options import Options
from core.errors import ConfigurationError

_ANY_CORES = 2**31
"""More cores than any machine has: a container on a CPU checks the real number itself."""


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Bundles of cores and GPUs, each on one node. Rank 0 is in the first."""

    bundles: int
    gpus: int
    """GPUs of a bundle: one for each of its ranks in each copy."""
    is_strict: bool
    """Whether every bundle needs a node of its own, because the user has set option.nodes."""

    def placement(self, cpus: float) -> tuple[list[dict[str, float]], str]:
        """Return Ray's bundles, each with these CPUs, and the strategy to place them."""
        bundle: dict[str, float] = {"CPU": cpus, "GPU": self.gpus}
        strategy = "STRICT_SPREAD" if self.is_strict else "PACK"
        return [{name: n for name, n in bundle.items() if n}] * self.bundles, strategy

    def fits(self, gpus_of_nodes: Sequence[int]) -> bool:
        """Return whether nodes with these GPUs have room for all bundles.

        Call it only if the bundles need GPUs.
        """
        rooms = (num_gpus // self.gpus for num_gpus in gpus_of_nodes)
        return sum(min(room, 1) if self.is_strict else room for room in rooms) >= self.bundles

    def __str__(self) -> str:
        gpus = f" with {quantity(self.gpus, 'GPU')} each" if self.gpus else ""
        if self.bundles == 1 or self.is_strict:
            return f"{quantity(self.bundles, 'node')}{gpus}"
        return f"{self.bundles} parts{gpus}, on as few nodes as have room"


def span_of(options: Options, gpus_of_nodes: Sequence[int]) -> NodeSpan:
    """Return the span of a replica: one node if its ranks fit, unless option.nodes says otherwise.

    gpus_of_nodes: the GPUs of each node of the cluster. If no node has enough GPUs for all ranks,
    the ranks are spread in equal parts over several nodes.

    Raises ConfigurationError if the cluster has no room for a replica.
    """
    if options.layout.nodes > len(gpus_of_nodes):
        raise ConfigurationError(
            f"option.nodes={options.layout.nodes}, but the cluster has "
            f"{quantity(len(gpus_of_nodes), 'node')}; add nodes or lower it"
        )
    if options.execution.device == "cpu" or not any(gpus_of_nodes):
        layout = lay_out(options, (), _ANY_CORES)
        return NodeSpan(layout.num_nodes, 0, is_strict=options.layout.nodes > 1)
    nodes = _num_nodes(options, gpus_of_nodes)
    gpus = tuple(map(str, range(_num_gpus(options, gpus_of_nodes))))
    layout = lay_out(options.changed(nodes=nodes), gpus, _ANY_CORES, "the largest node")
    span = NodeSpan(
        nodes, layout.num_copies * layout.num_local_ranks, is_strict=options.layout.nodes > 1
    )
    if not span.fits(gpus_of_nodes):
        raise _no_room(options, gpus_of_nodes)
    return span


def _num_gpus(options: Options, gpus_of_nodes: Sequence[int]) -> int:
    """Return the most GPUs that ranks can have on each of option.nodes nodes.

    With `max`, each node has as many ranks as the smallest of these nodes has GPUs. Otherwise
    `_num_nodes` has made sure that the nodes have room, and the largest node is the limit.
    """
    last = options.layout.nodes if options.execution.tensor_parallel_degree == "max" else 1
    return sorted(gpus_of_nodes, reverse=True)[last - 1]


def _num_nodes(options: Options, gpus_of_nodes: Sequence[int]) -> int:
    """Return the smallest number of equal parts in which the ranks fit on the nodes.

    Return option.nodes if the options give no number of ranks, ask for several copies, or give a
    number that `lay_out` refuses.
    """
    degree = options.execution.tensor_parallel_degree or ""
    if not degree.isdecimal() or options.layout.copies > 1 or int(degree) % options.layout.nodes:
        return options.layout.nodes
    ranks, is_strict = int(degree), options.layout.nodes > 1
    spans = (
        NodeSpan(n, ranks // n, is_strict)
        for n in range(options.layout.nodes, ranks + 1)
        if ranks % n == 0
    )
    for span in spans:
        if span.fits(gpus_of_nodes):
            return span.bundles
    if ranks:
        raise _no_room(options, gpus_of_nodes)
    return options.layout.nodes


def _no_room(options: Options, gpus_of_nodes: Sequence[int]) -> ConfigurationError:
    degree, nodes, reason = options.execution.tensor_parallel_degree, "", ""
    if options.layout.nodes > 1:
        nodes = f" with option.nodes={options.layout.nodes}"
        reason = ", on too few nodes for equal parts"
    return ConfigurationError(
        f"option.tensor_parallel_degree={degree}{nodes}, but the cluster "
        f"has {quantity(sum(gpus_of_nodes), 'GPU')}{reason}; add nodes or lower it"
    )
