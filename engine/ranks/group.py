"""The group of ranks that share one copy of a model, and its collectives."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # torch.distributed does not export them
    FileStore,
    Store,
    TCPStore,
)

from core.errors import ConfigurationError
from engine.ranks.order_types import GroupAddress
from engine.ranks.shard import Shard

STORE_S = 30.0
"""Time to reach the store of another machine, which is open before its address is sent here."""
_INTERFACE_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_EXACTLY = {"gloo": "", "nccl": "="}
"""Text to write before an interface's name. Without `=`, NCCL takes the name for a prefix."""


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

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        address: GroupAddress,
        store: Store | None = None,
    ) -> None:
        """Join the group. Blocks until all ranks have joined.

        store: the result of `open_store(address, size)`; None: open the store here.

        Raises ConfigurationError if this process is in a group already, and as `open_store` does.
        """
        self.shard, self.device = shard, device
        if dist.is_initialized():
            raise ConfigurationError(
                f"option.tensor_parallel_degree={shard.size}: this process already runs a model "
                "on several ranks; close that LLM first"
            )
        is_cuda = device.type == "cuda"
        backend = "nccl" if is_cuda else "gloo"
        with interface_for(backend, address.interface):
            dist.init_process_group(
                backend,
                store=open_store(address, shard.size) if store is None else store,
                rank=shard.rank,
                world_size=shard.size,
                timeout=timedelta(seconds=address.timeout_s),
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


class StoreServer:
    """The store of ranks on several machines, run by rank 0."""

    def __init__(self, host: str, listener: socket.socket) -> None:
        """listener: bound to an address of `host`, which is this machine; the store takes it over.

        Without a listener, the store would listen at all addresses.
        """
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def open_store(address: GroupAddress, size: int) -> Store:
    """Open the store through which ranks find each other.

    Raises ConfigurationError if the store is on another machine and cannot be reached.
    """
    if isinstance(address.store, str):
        return FileStore(address.store, size)
    limit = timedelta(seconds=STORE_S)
    try:
        store = TCPStore(address.host, address.store, is_master=False, timeout=limit)
    except RuntimeError as error:
        raise ConfigurationError(
            f"cannot reach rank 0 at {address.host}:{address.store} within {STORE_S:g} s; ranks "
            "use this port too, not only that of option.rank_address, and each start chooses other "
            "ports, so open all ports between the machines"
        ) from error
    store.set_timeout(timedelta(seconds=address.timeout_s))
    return store


@contextmanager
def interface_for(backend: str, name: str) -> Generator[None]:
    """Have the backend use a network interface, unless the user has chosen one."""
    variable = _INTERFACE_VARIABLES[backend]
    if not name or variable in os.environ:
        yield
        return
    os.environ[variable] = f"{_EXACTLY[backend]}{name}"
    try:
        yield
    finally:
        del os.environ[variable]
