"""Runs all layers of a decoder, and the norm after them, in one call of the CPU library."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.attention.backends import CpuBackend
from engine.attention.call import PagedAttention
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.model.layer import Layer
from engine.model.norms import Norm
from engine.model.rotary import StepAngles
from kernels.cpu.calls import NoKernelError
from kernels.cpu.step_calls import StepCalls


class OneCall:
    """Computes the same as the layers and the norm, without what is attached to linear layers."""

    def __init__(self, layers: Sequence[Layer], norm: Norm) -> None:
        self.no_kernel: NoKernelError | None = None
        """Why the library cannot run these layers; known once a step has tried."""
        self._layers, self._norm = layers, norm
        self._calls: StepCalls | None = None
        self._cache: KVCache | None = None
        """The one that `_calls` use."""

    def __call__(
        self, hidden: Tensor, angles: StepAngles, paged: PagedAttention, rows: Tensor | None
    ) -> Tensor | None:
        """Return normed states [T, width]. With `rows`, R < T, return only theirs, [R, width].
        The next call overwrites them.

        Returns None unless the library has kernels for the layers, and `paged` is a step of the CPU
        backend whose attention is all causal.
        """
        if not isinstance(paged, PagedStep) or not isinstance(paged.backend, CpuBackend):
            return None
        if paged.batches[0].images or self.no_kernel is not None:
            return None
        calls = self._calls
        if calls is None or calls.num_rows < len(hidden) or self._cache is not paged.cache:
            calls = self._prepare(hidden, paged.cache)
        return None if calls is None else calls(hidden, angles.by_rope, paged.batches, rows)

    def _prepare(self, hidden: Tensor, cache: KVCache) -> StepCalls | None:
        """Prepare all layers for steps of up to the next power of two tokens.

        Returns None, and sets `no_kernel`, if the library cannot run them.
        """
        self._calls = None  # frees its buffers
        num_rows = 1 << (len(hidden) - 1).bit_length()
        caches = cache.keys, cache.values, cache.group_of
        states = cache.states.layers if cache.states is not None else ()
        calls = StepCalls(num_rows, hidden.shape[1], hidden.dtype, *caches, states)
        try:
            for layer in self._layers:
                layer.prepare(calls)
            normed = calls.buffer("normed", hidden.shape[1])
            calls.result = self._norm.prepare(calls, calls.hidden, normed)
        except NoKernelError as error:
            # A traceback would keep the frames of this step: its inputs, and those of its callers.
            self.no_kernel = error.with_traceback(None)
            return None
        self._calls, self._cache = calls, cache
        return calls
