"""The group of processes that share a model; by default, one process that holds all of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from core.part import Feature
from engine.shard import Shard

After = Callable[[Tensor, Tensor], Tensor]
"""(rows [T, in], outputs [T, out]) -> outputs, which may be the same tensor."""


class Group:
    """A process's access to its group. This class: a group of one, which communicates with nobody.

    All processes must call the same methods in the same order. The tensors of a call have the same
    shape and dtype in every process.
    """

    def __init__(self, device: torch.device, shard: Shard | None = None) -> None:
        """shard: what this process holds; None: everything."""
        self.device = device
        self.shard = shard or Shard()

    @property
    def rank(self) -> int:
        """This process's number in the group. Process 0 schedules and samples."""
        return self.shard.rank

    @property
    def size(self) -> int:
        return self.shard.size

    @property
    def why_sums_vary(self) -> str:
        """Why the last bits of `sum` may depend on the batch; '' if they do not."""
        return ""

    def require_one(self, what: str) -> None:
        """Raise UnsupportedModelError if the group is of several. what: needs the whole model."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the processes' tensors. May overwrite `tensor`."""
        return tensor

    def lowest(self, number: int) -> int:
        """Return the lowest of the processes' numbers. Waits for the device."""
        return number

    def agree(self, number: float) -> float:
        """Return process 0's number. Waits for the device."""
        return number

    def look_up(self, table: Tensor, vocab_size: int) -> Callable[[Tensor], Tensor]:
        """Return a function from ids [T] to embeddings [T, width].

        table: this process's rows of the embedding.
        """
        return lambda token_ids: F.embedding(token_ids, table)

    def after_split_inputs(self) -> tuple[After, ...]:
        """Return what follows a layer of which each process has some of the inputs."""
        return ()

    def after_head(self, vocab_size: int) -> tuple[After, ...]:
        """Return what follows the head, of which each process has some of the outputs."""
        return ()


class SharedFeature(Feature, ABC):
    """A feature with weights of its own. Each process of a group has its own object of it."""

    @abstractmethod
    def share(self, send: Callable[[bytes], object]) -> None:
        """From now on, send every change of the weights to the other processes. Process 0 only."""

    @abstractmethod
    def carry_out(self, change: bytes) -> None:
        """Make a change that process 0 has sent."""
