"""Linear layers, norms and the gated MLP as lists of kernels, for `kernels.cpu.prepared_layers`.

If kernels are called one by one, Python checks and collects the arguments of every kernel on every
call, which takes longer than a small step takes to compute. Here, arguments that never change are
set once; `bind` sets the addresses of a step's buffers, and then all kernels run in one call.
Addresses point to rows of the layer's `dtype`, dense unless strides are passed.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu.calls import Kernel
from kernels.cpu.elementwise import Activation, Norm
from kernels.cpu.integers import IntegerPanels, integer_function
from kernels.cpu.linear import Linear, product_function
from kernels.cpu.shared_library import SUFFIXES, WIDTH, function


class NoKernelError(Exception):
    """The C++ library has no kernel for a layer; the message is the reason."""


class PreparedLinear:
    """A linear layer with its weight in panels.

    `of` makes a layer that computes `kernels.cpu.linear.linear`, and `of_integers` one that
    computes `kernels.cpu.integers.integer_linear`.
    """

    def __init__(
        self,
        kernel: ctypes._NamedFuncPointer,
        arguments: Linear,
        dtype: torch.dtype,
        depth: int,
        kept: tuple[object, ...],
    ) -> None:
        """arguments: those that no step changes. kept: owners of the memory they point to."""
        self.num_columns: int = arguments.num_columns
        self.dtype = dtype
        """Dtype of rows and outputs."""
        self.depth = depth
        """Elements of a row."""
        self._arguments, self._kept = arguments, kept
        self._at_once = depth // arguments.depth
        self.kernel = Kernel(kernel, arguments)

    @classmethod
    def of(cls, panels: Tensor, num_columns: int, bias: Tensor | None) -> PreparedLinear:
        """Make a layer from the panels of `fill_panels`.

        bias: fp32 [num_columns], dense.
        """
        arguments = Linear(
            panels=panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            num_columns=num_columns,
            depth=panels.shape[1],
        )
        dtype = panels.dtype if panels.dim() == 4 else torch.float32
        depth = panels.shape[1] * panels[0, 0, 0].numel()
        return cls(product_function(panels), arguments, dtype, depth, (panels, bias))

    @classmethod
    def of_integers(
        cls, panels: IntegerPanels, bias: Tensor | None, dtype: torch.dtype, *, is_rounded: bool
    ) -> PreparedLinear:
        """Make a layer from integer weights.

        bias: fp32 [num_columns], dense. dtype: the dtype of rows and outputs.
        """
        kernel = integer_function(dtype, is_rounded=is_rounded)
        return cls(kernel, panels.arguments(bias), dtype, panels.depth, (panels, bias))

    def bind(
        self,
        rows: int,
        num_rows: int,
        out: int,
        residual: int | None = None,
        stride: int | None = None,
    ) -> None:
        """Set the addresses of a step.

        rows, out: addresses of elements of `dtype`. residual: address of rows to which the result,
        rounded to `dtype`, is added; may equal `out`. stride: elements between rows, `depth` if
        None.
        """
        arguments = self._arguments
        arguments.residual = residual
        arguments.row_stride = (stride or self.depth) // self._at_once
        arguments.rows, arguments.num_rows, arguments.out = rows, num_rows, out


class PreparedNorm:
    """`kernels.elementwise.torch_elementwise.rms_norm` for rows of one width."""

    def __init__(
        self, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_first: bool = True
    ) -> None:
        """Raises NoKernelError if the C++ has no kernel for the width or dtype."""
        _check(weight.shape[0], weight.dtype)
        self.dtype = weight.dtype
        self.width = weight.shape[0]
        self._weight = weight  # kept alive: the arguments point to it
        self._arguments = Norm(
            weight=weight.data_ptr(),
            num_heads=1,
            width=self.width,
            eps=eps,
            offset=offset,
            rounds_first=rounds_first,
        )
        self.kernel = Kernel(function("rms_norm", weight.dtype), self._arguments)

    def bind(
        self,
        rows: int,
        num_tokens: int,
        out: int,
        num_heads: int = 1,
        strides: tuple[int, int] | None = None,
        residual: int | None = None,
    ) -> None:
        """Set the addresses of a step.

        num_heads: rows per token, each normalized by itself. strides: elements between tokens and
        between heads, dense if None. residual: address of dense rows to which the result is
        added; may equal `out`.
        """
        arguments = self._arguments
        arguments.rows, arguments.out, arguments.residual = rows, out, residual
        arguments.strides[:] = strides or (self.width, 0)
        arguments.num_tokens, arguments.num_heads = num_tokens, num_heads


class PreparedMLP:
    """A gated MLP: the fused gate and up projection, the gated activation, the down projection."""

    def __init__(
        self,
        gate_up: PreparedLinear,
        down: PreparedLinear,
        activation: Literal["silu", "gelu_tanh"],
    ) -> None:
        """Raises NoKernelError if the C++ has no kernel for the width or dtype, or if the
        projections do not match."""
        _check(gate_up.num_columns // 2, gate_up.dtype)
        if gate_up.num_columns != 2 * down.depth or gate_up.dtype != down.dtype:
            raise NoKernelError("the sizes or dtypes of its projections do not match")
        self.dtype = gate_up.dtype
        self.scratch_width = gate_up.num_columns
        """Scratch elements per token."""
        self._gate_up, self._down = gate_up, down
        stride = self.scratch_width
        self._arguments = Activation(
            width=down.depth, stride=stride, out_stride=stride, is_gelu=activation == "gelu_tanh"
        )
        activate = Kernel(function("gated_activation", gate_up.dtype), self._arguments)
        self.kernels = [gate_up.kernel, activate, down.kernel]

    def bind(
        self, hidden: int, num_tokens: int, out: int, scratch: int, residual: int | None = None
    ) -> None:
        """Set the addresses of a step.

        out: may equal `hidden`. residual: address of rows to which the result is added; may equal
        `out`.
        """
        arguments = self._arguments
        arguments.gate_up = arguments.out = scratch  # each result overwrites its gate
        arguments.num_tokens = num_tokens
        self._gate_up.bind(hidden, num_tokens, scratch)
        self._down.bind(scratch, num_tokens, out, residual, self.scratch_width)


def _check(width: int, dtype: torch.dtype) -> None:
    if dtype not in SUFFIXES or width % WIDTH:
        raise NoKernelError(f"no kernel computes a width of {width} in {dtype}")
