"""Captures CUDA graphs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Work = Callable[[], object]
"""Launches kernels."""
MAX_DEVICE_TIME = 1.1
"""A step is launch-bound up to this ratio of its device time to its launch time. It is above 1,
because the last kernels end a little after the last launch."""


class CudaRecorder:
    """Captures CUDA graphs. They share one memory pool, since only one runs at a time.

    They also share one stream: cuBLAS keeps a workspace for each stream that it has seen.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._clock = clock

    def record(self, work: Work) -> Work:
        """Capture `work`, and return a function that replays its kernels.

        Raises RuntimeError if `work` waits for the device. A first run, without capture, compiles
        kernels and sets up libraries, and it finds code that waits. If the capture itself failed on
        such code, torch's memory pool would stay open and later frees would fail.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _no_synchronization():
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay

    def is_launch_bound(self, work: Work) -> bool:
        """Whether launching the kernels of `work` takes about as long as running them, or longer.

        If not, the device is busy all the time even without a graph.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels
            self._stream.synchronize()
            begin = self._clock()
            work()
            launched = self._clock()
            self._stream.synchronize()
        return self._clock() - begin <= MAX_DEVICE_TIME * (launched - begin)


@contextmanager
def _no_synchronization() -> Iterator[None]:
    """Make torch raise RuntimeError where the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns that it may not detect everything
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
