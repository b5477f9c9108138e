"""How many ranks share a model."""

from __future__ import annotations

from core.errors import ConfigurationError


def num_ranks(degree: str | None, num_gpus: int, place: str) -> int:
    """Return the ranks that `option.tensor_parallel_degree` asks for. 1 if it is not set.

    num_gpus: those that `place` has. 0: a CPU, which any number of ranks can share.

    Raises ConfigurationError for an invalid degree and for more ranks than GPUs.
    """
    if degree is None:
        return 1
    if degree == "max":
        return max(1, num_gpus)
    if not degree.isdecimal() or int(degree) == 0:
        raise ConfigurationError(
            f"option.tensor_parallel_degree={degree}: expected a positive integer or max"
        )
    if num_gpus and int(degree) > num_gpus:
        gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        raise ConfigurationError(
            f"option.tensor_parallel_degree={degree}, but {place} has {gpus}; set it to at most "
            f"{num_gpus}"
        )
    return int(degree)
