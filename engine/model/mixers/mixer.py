"""What the layers with a state have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from core.states.layout import LayerState
from engine.attention.call import PagedAttention
from engine.model.loader import Loader
from engine.model.rotary import StepAngles
from kernels.attention.batch import PagedBatch
from kernels.cpu.calls import Kernel, NoKernelError
from kernels.cpu.state import Convolution, Recurrence, convolution, gates, recurrence
from kernels.cpu.step_calls import StepCalls


class Mixer(ABC):
    """Stands in the place of a layer's attention."""

    @abstractmethod
    def __call__(
        self,
        hidden: Tensor,
        angles: StepAngles,
        paged: PagedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the output [T, hidden], or only its `rows`, [R, hidden]."""

    def prepare(
        self, calls: StepCalls, rows: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Raise NoKernelError: the layers run one after another."""
        raise NoKernelError("it keeps a state")


def rows_of(sizes: Sequence[int], parts: Sequence[range]) -> Tensor | None:
    """Return some rows of each of several matrices, one below the other, int64; None: all rows.

    sizes: rows of the matrices. parts: the rows to take of each.
    """
    if all(len(part) == size for size, part in zip(sizes, parts, strict=True)):
        return None
    starts = accumulate(sizes, initial=0)
    rows = [
        torch.arange(start + part.start, start + part.stop)
        for start, part in zip(starts, parts, strict=False)
    ]
    return torch.cat(rows)


def load_taps(
    loader: Loader, name: str, state: LayerState, width: int, order: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Load a causal convolution whose tails are the first tensor of a layer's state.

    Return the taps [taps, C], the one of the token itself last, and the bias [C] or None.

    width: channels in the checkpoint. order: those of this process, [C] int64; None: all.
    """
    num_kept = state[0].dims[0]
    taps = loader.tensor(f"{name}.weight", width, 1, num_kept + 1)
    bias = loader.optional(f"{name}.bias", width)
    if order is not None:
        order = order.to(loader.device)
        taps, bias = taps[order], None if bias is None else bias[order]
    return taps[:, 0].T.contiguous(), bias


def prepare_convolution(
    calls: StepCalls,
    layer: int,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    **options: Any,
) -> None:
    """Have `calls` write the convolution of rows to `out`, [T, C], which may be `rows`.

    layer: the number of a layer among those with a state. options: those of
    `kernels.cpu.state.convolution`. Raises NoKernelError.
    """
    _add(calls, convolution(rows, weight, bias, calls.states[layer][0], out, **options), out)


def prepare_gates(
    calls: StepCalls, time: Tensor, rates: Tensor | None, scale: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Have `calls` compute the decay and the rate of a recurrence, [T, heads] fp32. Return both.

    The arguments are those of `kernels.state.reference.state_gates`. Raises NoKernelError.
    """
    decay, rate = (calls.buffer(name, len(scale), torch.float32) for name in ("decay", "rate"))
    calls.add(gates(time, rates, scale, offset, decay, rate))
    return decay, rate


def prepare_recurrence(
    calls: StepCalls, layer: int, *tokens: Tensor, out: Tensor, **options: Any
) -> None:
    """Have `calls` write the outputs of the recurrence to `out`, which may be its values.

    tokens, options: those of `kernels.cpu.state.recurrence`. Raises NoKernelError.
    """
    query, key, value, decay, rate = tokens
    states = calls.states[layer][1]
    _add(calls, recurrence(query, key, value, decay, rate, states, out, **options), out)


def _add(calls: StepCalls, kernel: Kernel[Convolution | Recurrence], out: Tensor) -> None:
    def set_places(batch: PagedBatch) -> None:
        assert batch.states is not None
        kernel.arguments.set_batch(batch.states)

    calls.add_placed(kernel, set_places, out)
