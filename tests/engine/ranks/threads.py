"""Ranks as threads of one process, whose collectives are a barrier and a list."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.ranks.group import RankGroup
from engine.shard import Shard

TIMEOUT_S = 60


class ThreadGroup(RankGroup):
    """A group as the thread of rank `shard.rank` sees it."""

    def __init__(self, shard, barrier, tensors):
        super().__init__(torch.device("cpu"), shard)
        self._barrier, self._tensors = barrier, tensors
        self.num_sums = 0

    def sum(self, tensor):
        self.num_sums += 1
        return torch.stack(self.gather(tensor)).sum(0)

    def gather(self, tensor):
        self._tensors[self.rank] = tensor.clone()
        self._barrier.wait(TIMEOUT_S)
        gathered = list(self._tensors)
        self._barrier.wait(TIMEOUT_S)
        return gathered

    def broadcast(self, tensor):
        tensor.copy_(self.gather(tensor)[0])

    def abort(self):
        """Make the others' collectives fail."""
        self._barrier.abort()


def thread_groups(size):
    """Return the group as each of its ranks sees it."""
    barrier, tensors = threading.Barrier(size), [None] * size
    return [ThreadGroup(Shard(rank, size), barrier, tensors) for rank in range(size)]


def run_ranks(size, work):
    """Run `work(group)` in a thread for each rank. Return the results, or raise the first error."""

    def run(group):
        try:
            return work(group)
        except BaseException:
            group.abort()  # otherwise the other ranks would wait for ever
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, group) for group in thread_groups(size)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
