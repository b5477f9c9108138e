"""Which GPUs, or which share of a CPU, each copy of the model and each of its ranks gets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from core.configuration.options import Options
from core.errors import ConfigurationError
from core.process.gpus import visible_gpus
from core.process.processes import num_cores
from core.protocol.facts import Facts


@dataclass(frozen=True, slots=True)
class Layout:
    """Copies of the model and the ranks of each copy. Every rank has its own GPU or CPU cores.

    With several nodes, this machine is one of them.
    """

    num_copies: int
    num_ranks: int
    """Ranks that share one copy."""
    gpus: tuple[str, ...]
    """The GPUs of this machine; each rank takes the next one. Empty for a CPU."""
    num_cores: int
    num_nodes: int = 1
    """Machines that share the only copy."""

    @property
    def num_local_ranks(self) -> int:
        """Ranks of a copy on this machine."""
        return self.num_ranks // self.num_nodes

    @property
    def num_threads(self) -> int:
        """OpenMP threads of a rank on a CPU."""
        return max(1, self.num_cores // (self.num_copies * self.num_local_ranks))

    def gpus_of(self, copy: int) -> tuple[str, ...]:
        """Return the GPUs of a copy's ranks on this machine; none on a CPU."""
        return self.gpus[copy * self.num_local_ranks : (copy + 1) * self.num_local_ranks]

    def variables(self, copy: int, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a copy's engine. variables: this process's environment.

        A single copy gets this environment unchanged, and divides all GPUs and cores among its
        ranks. For several copies on a CPU, the user's own OMP_NUM_THREADS may lower the number of
        threads, but not raise it.
        """
        if self.num_copies == 1:
            return dict(variables)
        if self.gpus:
            return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(self.gpus_of(copy))}
        given = variables.get("OMP_NUM_THREADS", "")
        num_threads = min(self.num_threads, int(given)) if given.isdecimal() else self.num_threads
        return {**variables, "OMP_NUM_THREADS": str(max(1, num_threads))}

    def rank_variables(self, index: int, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of this machine's rank `index`, if another node has rank 0."""
        if self.gpus:
            return {**variables, "CUDA_VISIBLE_DEVICES": self.gpus_of(0)[index]}
        return {"OMP_NUM_THREADS": str(self.num_threads), **variables}

    def lines(self) -> Iterator[str]:
        """Yield a line that sums up the layout, then a line for each copy."""
        copies, ranks = (
            quantity(self.num_copies, "copy", "copies"),
            quantity(self.num_ranks, "rank"),
        )
        machines = f" on {self.num_nodes} machines" if self.num_nodes > 1 else ""
        yield f"  layout: {copies} x {ranks}{machines}"
        for copy in range(self.num_copies):
            places = [f"rank {rank} on GPU {gpu}" for rank, gpu in enumerate(self.gpus_of(copy))]
            if not self.gpus:
                local, threads = range(self.num_local_ranks), quantity(self.num_threads, "thread")
                places = [f"rank {rank} on the CPU, {threads}" for rank in local]
            if self.num_nodes > 1:
                places.append("the others on other machines")
            yield f"    copy {copy}: {'; '.join(places)}"


def lay_out(
    options: Options, gpus: Sequence[str], num_cores: int, place: str = "this machine"
) -> Layout:
    """Lay out the copies and ranks that the options ask for.

    gpus: the GPUs of `place`; empty if the model runs on its CPU, which has `num_cores`.

    Raises ConfigurationError if there are too few GPUs or, for several copies, too few cores, and
    if several copies are to span machines.
    """
    copies, degree, nodes = (
        options.layout.copies,
        options.execution.tensor_parallel_degree,
        options.layout.nodes,
    )
    if copies > 1 and nodes > 1:
        raise ConfigurationError(
            f"option.copies={copies} with option.nodes={nodes}: a copy on several machines takes "
            "all their GPUs; leave out one of the two options"
        )
    num_gpus = len(gpus) // copies if degree == "max" else len(gpus)
    ranks = num_ranks(degree, num_gpus, place, nodes)
    num_devices = len(gpus) or num_cores
    if copies > 1 and copies * ranks > num_devices:
        devices = quantity(num_devices, "GPU" if gpus else "core")
        raise ConfigurationError(
            f"option.copies={copies} with {quantity(ranks, 'rank')} each needs {copies * ranks} "
            f"{'GPUs' if gpus else 'cores'}, but {place} has {devices}; set option.copies to at "
            f"most {max(1, num_devices // ranks)}"
        )
    return Layout(copies, ranks, tuple(gpus), num_cores, nodes)


def require_one_engine(options: Options, model: str) -> None:
    """Raise ConfigurationError if `model`, such as one of several, would not run as one engine."""
    for name, number, cannot in (
        ("copies", options.layout.copies, "cannot have copies"),
        ("nodes", options.layout.nodes, "runs on one machine"),
    ):
        if number > 1:
            raise ConfigurationError(
                f"option.{name}={number}: {model} {cannot}; leave the option out"
            )


def layout_here(options: Options, variables: Mapping[str, str] = os.environ) -> Layout:
    """Return the layout on this machine. Raises ConfigurationError as `lay_out` does."""
    gpus = () if options.execution.device == "cpu" else visible_gpus(variables)
    return lay_out(options, gpus, num_cores())


def num_ranks(degree: str | None, num_gpus: int, place: str, nodes: int = 1) -> int:
    """Return the ranks that `option.tensor_parallel_degree` asks for. 1 if it is not set.

    num_gpus: the GPUs of `place`. 0 means a CPU, which any number of ranks can share. nodes: the
    machines that share the ranks equally.

    Raises ConfigurationError for an invalid degree, for more ranks than GPUs, and for ranks that
    cannot be shared equally.
    """
    if degree == "max":
        return max(1, num_gpus) * nodes
    degree = "1" if degree is None else degree
    if not degree.isdecimal() or int(degree) == 0:
        raise ConfigurationError(
            f"option.tensor_parallel_degree={degree}: expected a positive integer or max"
        )
    if int(degree) % nodes:
        raise ConfigurationError(
            f"option.tensor_parallel_degree={degree} cannot be divided by option.nodes={nodes}: "
            "every machine has the same number of ranks"
        )
    if num_gpus and int(degree) > num_gpus * nodes:
        gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        machines = "" if nodes == 1 else f" with option.nodes={nodes}"
        raise ConfigurationError(
            f"option.tensor_parallel_degree={degree}{machines}, but {place} has {gpus}; set it to "
            f"at most {num_gpus * nodes}, or set option.nodes to the number of machines that share "
            "the model"
        )
    return int(degree)


def equal_part(count: int, num_ranks: int, what: str) -> int:
    """Return how many of `count` things each rank has. what: the things, for the error.

    Raises ConfigurationError if the ranks cannot have equally many.
    """
    if count % num_ranks:
        raise ConfigurationError(
            f"option.tensor_parallel_degree={num_ranks}: the ranks cannot divide the model's "
            f"{count} {what} equally; use a divisor of {count}"
        )
    return count // num_ranks


def extent(facts: Facts, num_copies: int) -> str:
    """Return how many copies there are, and of how many ranks each."""
    return f"{quantity(num_copies, 'copy', 'copies')} x {quantity(facts.num_ranks, 'rank')}"


def whose_memory(facts: Facts) -> str:
    """Return the word for the memory that `facts` are about."""
    return "memory of each rank" if facts.num_ranks > 1 else "memory"


def quantity(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
