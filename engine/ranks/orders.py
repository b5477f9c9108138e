"""Orders to the ranks on other nodes. Those on rank 0's own node have pipes, which are faster."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo

from engine.ranks.store import FOREVER, network_of, open_store
from engine.shard import Shard

FRAME_BYTES = 1024
"""Bytes of an order that are sent together with its length. Nearly all orders are shorter."""
_LENGTH_BYTES = 8


class RemoteOrders:
    """A group of gloo, even between GPUs: rank 0, and the ranks that are on other nodes."""

    def __init__(self, address: str, shard: Shard, nodes: int) -> None:
        """Wait until all members have joined.

        address: the store's. nodes: the nodes that share the ranks equally; rank 0's is the first.
        """
        num_others = shard.size // nodes - 1  # on rank 0's node
        member, num_members = max(0, shard.rank - num_others), shard.size - num_others
        store = PrefixStore("orders", open_store(address))
        with network_of(address):
            # A rank may wait for its next order for ever. `engine.ranks.watch` notices a lost rank.
            gloo = ProcessGroupGloo(store, member, num_members, FOREVER)
        self._group = cast(ProcessGroup, gloo)  # torch does not declare its collectives

    def send(self, message: bytes) -> None:
        """Send an order to all other members. Raises RuntimeError if one of them has ended."""
        framed = bytearray(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
        framed += bytes(max(0, FRAME_BYTES - len(framed)))
        tensor = torch.frombuffer(framed, dtype=torch.uint8)
        self._broadcast(tensor[:FRAME_BYTES])
        if len(framed) > FRAME_BYTES:
            self._broadcast(tensor[FRAME_BYTES:])

    def receive(self) -> bytes:
        """Wait for an order of rank 0. Raises RuntimeError if another member has ended."""
        framed = self._receive(FRAME_BYTES)
        end = _LENGTH_BYTES + int.from_bytes(framed[:_LENGTH_BYTES], "little")
        if end > FRAME_BYTES:
            framed += self._receive(end - FRAME_BYTES)
        return framed[_LENGTH_BYTES:end]

    def _receive(self, num_bytes: int) -> bytes:
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self._broadcast(tensor)
        return tensor.numpy().tobytes()

    def _broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()
