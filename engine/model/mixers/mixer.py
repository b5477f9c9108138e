"""What the layers with a state have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.states.layout import LayerState
from engine.attention.call import PagedAttention
from engine.model.loader import Loader
from engine.model.rotary import StepAngles
from kernels.attention.batch import PagedBatch
from kernels.cpu.calls import NoKernelError
from kernels.cpu.state import convolution
from kernels.cpu.step_calls import StepCalls

LAST_POWER = 15
"""Of the series of `_softplus`: what it leaves out is below 1e-8."""


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


def make_softplus(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return log(1 + exp(x)) of fp32 numbers."""
    return _softplus if device.type == "cpu" else F.softplus


def _softplus(x: Tensor) -> Tensor:
    """Compute what `F.softplus` does without a logarithm, whose bits depend on the other numbers.

    log(1 + t) = 2 atanh(u) with u = t / (2 + t), up to 1/3 here: a series of odd powers.
    """
    t = torch.exp(-x.abs())
    u = t / (2 + t)
    square = u * u
    series = torch.full_like(x, 1 / LAST_POWER)
    for power in range(LAST_POWER - 2, 0, -2):
        series = series * square + 1 / power
    return x.clamp(min=0) + 2 * u * series


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
    kernel = convolution(rows, weight, bias, calls.states[layer][0], out, **options)

    def set_places(batch: PagedBatch) -> None:
        assert batch.states is not None
        kernel.arguments.set_batch(batch.states)

    calls.add_placed(kernel, set_places, out)
