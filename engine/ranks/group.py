"""The group of ranks that share a model, its collectives, and the layers that use them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core.errors import ConfigurationError
from engine.ranks.shard import Shard
from engine.ranks.store import network_of, open_store


class Group(ABC):
    """A rank's access to its group. All ranks must call the same methods in the same order.

    The tensors of a call have the same shape and dtype on every rank.
    """

    shard: Shard
    device: torch.device

    @property
    def rank(self) -> int:
        """This process's number in the group. Rank 0 schedules and samples."""
        return self.shard.rank

    @property
    def size(self) -> int:
        return self.shard.size

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors. May overwrite `tensor`."""

    @abstractmethod
    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in their order."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with rank 0's."""

    def lowest(self, number: int) -> int:
        """Return the lowest of the ranks' numbers. Waits for the device."""
        own_number = torch.tensor([number], device=self.device)
        return min(int(part) for part in self.gather(own_number))

    def agree(self, number: float) -> float:
        """Return rank 0's number. Waits for the device."""
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        self.broadcast(tensor)
        return tensor.item()


class SingleRank(Group):
    """A group of one rank, which communicates with nobody."""

    def __init__(self, device: torch.device) -> None:
        self.shard, self.device = Shard(), device

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def agree(self, number: float) -> float:
        return number


class ProcessGroup(Group):
    """A group of processes: NCCL between CUDA devices, gloo on a CPU.

    It is torch's default process group, of which a process has only one.
    """

    def __init__(self, shard: Shard, device: torch.device, address: str, timeout_s: float) -> None:
        """Join the group. Blocks until all ranks have joined.

        address: the store's. timeout_s: the longest wait for the other ranks in a collective.

        Raises ConfigurationError if this process is in a group already.
        """
        self.shard, self.device = shard, device
        if dist.is_initialized():
            raise ConfigurationError(
                f"option.tensor_parallel_degree={shard.size}: this process already runs a model "
                "on several ranks; close that LLM first"
            )
        is_cuda = device.type == "cuda"
        with network_of(address):
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=open_store(address),
                rank=shard.rank,
                world_size=shard.size,
                timeout=timedelta(seconds=timeout_s),
                # NCCL then allocates its buffers now, before the free memory is measured.
                device_id=torch.device("cuda", torch.cuda.current_device()) if is_cuda else None,
            )

    def sum(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda" or tensor.dtype == torch.float32:
            dist.all_reduce(tensor)
            return tensor
        # In low precision, gloo would round after each addition.
        whole = tensor.float()
        dist.all_reduce(whole)
        return whole.to(tensor.dtype)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        parts = list(gathered.unbind())
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0)

    def close(self) -> None:
        """Leave the group. May be called again."""
        if dist.is_initialized():
            dist.destroy_process_group()


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


class Summed:
    """Adds up the products of layers of which each rank has some of the inputs."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, rows: Tensor, outputs: Tensor) -> Tensor:
        return self._group.sum(outputs)


class Gathered:
    """Gathers the logits of all ranks' shares of the vocabulary."""

    def __init__(self, vocab_size: int, group: Group) -> None:
        self._vocab_size, self._group = vocab_size, group

    def __call__(self, rows: Tensor, outputs: Tensor) -> Tensor:
        """Return logits [R, vocab_size] for this rank's, [R, share]."""
        whole = torch.cat(self._group.gather(outputs), -1)
        return whole[:, : self._vocab_size].contiguous()
