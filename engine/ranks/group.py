"""A group of several ranks, and the layers that use its collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.call import UnsupportedModelError
from engine.group import After, Group


class RankGroup(Group, ABC):
    """The collectives of several ranks."""

    @property
    def why_sums_vary(self) -> str:
        if self.device.type != "cpu" or self.size <= 2:
            return ""
        return f"gloo adds up the results of {self.size} ranks in an order of its own"

    def require_one(self, what: str) -> None:
        raise UnsupportedModelError(
            f"{what} runs on one rank, but option.tensor_parallel_degree is {self.size}"
        )

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in their order."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with rank 0's."""

    def lowest(self, number: int) -> int:
        own_number = torch.tensor([number], device=self.device)
        return min(int(part) for part in self.gather(own_number))

    def agree(self, number: float) -> float:
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        self.broadcast(tensor)
        return tensor.item()

    def look_up(self, table: Tensor, vocab_size: int) -> Callable[[Tensor], Tensor]:
        return SplitEmbedding(table, vocab_size, self)

    def after_split_inputs(self) -> tuple[After, ...]:
        return (lambda rows, outputs: self.sum(outputs),)

    def after_head(self, vocab_size: int) -> tuple[After, ...]:
        return (Gathered(vocab_size, self),)


class SplitEmbedding:
    """Looks up embeddings in a table of which each rank holds some rows."""

    def __init__(self, table: Tensor, vocab_size: int, group: Group) -> None:
        """table: this rank's rows, [share, width]."""
        self._table, self._group = table, group
        self._share = group.shard.vocabulary(vocab_size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, width] of ids [T].

        Only one rank has the embedding of an id; the other ranks add zeros to the sum.
        """
        start = self._share.start
        foreign = (token_ids < start) | (token_ids >= self._share.stop)
        found = F.embedding((token_ids - start).masked_fill(foreign, 0), self._table)
        return self._group.sum(found.masked_fill(foreign[:, None], 0))


class Gathered:
    """Gathers the logits of all ranks' shares of the vocabulary."""

    def __init__(self, vocab_size: int, group: RankGroup) -> None:
        self._vocab_size, self._group = vocab_size, group

    def __call__(self, rows: Tensor, outputs: Tensor) -> Tensor:
        """Return logits [R, vocab_size] for this rank's, [R, share]."""
        whole = torch.cat(self._group.gather(outputs), -1)
        return whole[:, : self._vocab_size].contiguous()
