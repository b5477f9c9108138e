"""How many ranks share a model."""

from __future__ import annotations

import torch

from core.configuration.layout import num_ranks
from core.configuration.options import ExecutionOptions


def tensor_parallel_degree(
    execution: ExecutionOptions, device: torch.device, nodes: int = 1
) -> int:
    """Return how many ranks share the model, on all of `nodes` machines.

    `max` means all GPUs, and one rank on a CPU.

    Raises ConfigurationError for an invalid degree, and on CUDA for more ranks than GPUs.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    return num_ranks(execution.tensor_parallel_degree, num_gpus, "this machine", nodes)


def notes_on_one_rank(execution: ExecutionOptions, device: torch.device) -> tuple[str, ...]:
    """Return a note if the options ask for several devices, but the task runs on one.

    Raises ConfigurationError as `tensor_parallel_degree` does.
    """
    degree = tensor_parallel_degree(execution, device)
    if degree == 1:
        return ()
    return (
        f"option.tensor_parallel_degree={execution.tensor_parallel_degree}: this task runs "
        "on one device; only text generation runs on several ranks",
    )
