"""The group of the processes that share a model."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from core.configuration.options import ExecutionOptions
from core.errors import ConfigurationError
from engine.ranks.group import RankGroup
from engine.ranks.store import network_of, open_store
from engine.shard import Shard


def join_group(
    shard: Shard, device: torch.device, address: str, options: ExecutionOptions
) -> ProcessGroup:
    """Join the group that these options ask for, as `ProcessGroup` does."""
    kind = OrderedGroup if options.batch_invariant else ProcessGroup
    return kind(shard, device, address, options.model_loading_timeout)


class ProcessGroup(RankGroup):
    """A group of processes: NCCL between CUDA devices, gloo on a CPU.

    It is torch's default process group, of which a process has only one.
    """

    def __init__(self, shard: Shard, device: torch.device, address: str, timeout_s: float) -> None:
        """Join the group. Blocks until all ranks have joined.

        address: the store's. timeout_s: the longest wait for the other ranks in a collective.

        Raises ConfigurationError if this process is in a group already.
        """
        super().__init__(device, shard)
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


class OrderedGroup(ProcessGroup):
    """Adds in the order of the ranks.

    NCCL and gloo add in an order that depends on the size of the tensor, that is on the batch. With
    2 ranks this moves as much data as their sum, with 8 ranks four times as much.
    """

    @property
    def why_sums_vary(self) -> str:
        return ""

    def sum(self, tensor: Tensor) -> Tensor:
        first, *others = self.gather(tensor)
        total = first.float()
        for part in others:
            total = total + part.float()
        return total.to(tensor.dtype)
