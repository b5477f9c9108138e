"""Runs all layers of an encoder, and the norm after them, in one call of the CPU library."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.encoder.layer import Angles, EncoderLayer, Pass
from engine.model.norms import Norm
from kernels.cpu.calls import NoKernelError
from kernels.cpu.step_calls import StepCalls


class OneCall:
    """Computes the same as the layers and the norm. As with decoders, a row's bits depend on no
    other text."""

    def __init__(self, layers: Sequence[EncoderLayer], norm: Norm | None) -> None:
        self.no_kernel: NoKernelError | None = None
        """Why the library cannot run these layers; known once a pass has tried."""
        self._layers, self._norm = layers, norm
        self._calls: StepCalls | None = None

    def __call__(self, hidden: Tensor, step: Pass) -> Tensor | None:
        """Return the last hidden states of rows [T, hidden], which the next call overwrites.

        Returns None unless the library has kernels for the layers and the pass.
        """
        if self.no_kernel is not None or hidden.device.type != "cpu" or step.bias is not None:
            return None
        calls = self._calls
        if calls is None or calls.num_rows < len(hidden):
            calls = self._prepare(hidden, step.angles)
        return None if calls is None else calls(hidden, step.angles, [step.texts.as_batch()])

    def _prepare(self, hidden: Tensor, angles: Angles) -> StepCalls | None:
        """Prepare all layers for up to the next power of two rows.

        Returns None, and sets `no_kernel`, if the library cannot run them.
        """
        self._calls = None  # frees its buffers
        num_rows = 1 << (len(hidden) - 1).bit_length()
        calls = StepCalls(num_rows, hidden.shape[1], hidden.dtype, keys=(), values=(), groups=())
        try:
            for layer in self._layers:
                layer.prepare(calls, angles)
            if self._norm is not None:
                normed = calls.buffer("normed", hidden.shape[1])
                calls.result = self._norm.prepare(calls, calls.hidden, normed)
        except NoKernelError as error:
            # Without the frames below it, whose variables hold the requests of this step.
            self.no_kernel = error.with_traceback(None)
            return None
        self._calls = calls
        return calls
