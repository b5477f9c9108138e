"""How many ranks share a model, and where those of several machines meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from core.errors import ConfigurationError
from core.options import Options

KEY_VARIABLE = "LONGSHORE_RANK_KEY"
"""The environment variable with the secret of ranks on several machines."""
MIN_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where rank 0 waits for the ranks of other machines."""

    host: str
    port: int
    key: bytes = field(repr=False)
    """The secret that both sides must know."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def num_ranks(degree: str | None, num_gpus: int, place: str, nodes: int = 1) -> int:
    """Return the ranks that `option.tensor_parallel_degree` asks for. 1 if it is not set.

    num_gpus: those that `place` has. 0: a CPU, which any number of ranks can share. nodes: the
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
            "every machine has as many ranks"
        )
    if num_gpus and int(degree) > num_gpus * nodes:
        gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        machines = "" if nodes == 1 else f" with option.nodes={nodes}"
        raise ConfigurationError(
            f"option.tensor_parallel_degree={degree}{machines}, but {place} has {gpus}; set it to "
            f"at most {num_gpus * nodes}, or option.nodes to the machines that share the model"
        )
    return int(degree)


def meeting_point(options: Options, variables: Mapping[str, str] = os.environ) -> MeetingPoint:
    """Return where the ranks of several machines meet.

    Raises ConfigurationError if the address or the key is missing or wrong.
    """
    host, _, port = (options.rank_address or "").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # as IPv6 addresses are written
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigurationError(
            f"option.nodes={options.nodes} needs option.rank_address=HOST:PORT, an address of rank "
            f"0's machine that the others reach; it is {options.rank_address or 'not set'}"
        )
    key = variables.get(KEY_VARIABLE, "")
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigurationError(
            f"option.nodes={options.nodes} needs the environment variable {KEY_VARIABLE}: the same "
            f"secret of at least {MIN_KEY_LENGTH} characters on every machine, such as the output "
            "of `openssl rand -hex 32`"
        )
    return MeetingPoint(host, int(port), key.encode())
