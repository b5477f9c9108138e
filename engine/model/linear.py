"""`Linear`, its weight as a checkpoint stores it, and the formats that it may have for a device.

A format is built from a checkpoint's tensors, multiplies rows and knows its size in bytes. To add
a format, write such a class and return it from `choose_format`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.group import After
from kernels.cpu import linear as cpu_linear
from kernels.cpu.calls import SUFFIXES, Kernel, NoKernelError
from kernels.cpu.elementwise import ACTIVATIONS
from kernels.cpu.step_calls import StepCalls


class Quantized(ABC):
    """A weight [out, in] of another form than a plain tensor, as a checkpoint stores it."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @property
    @abstractmethod
    def kind(self) -> tuple[object, ...]:
        """Weights of equal kind can be joined row by row."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors; each has a row for every output."""

    @abstractmethod
    def with_tensors(self, *tensors: Tensor) -> Self:
        """Return the same kind of weight with other tensors."""

    @abstractmethod
    def of_columns(self, columns: range) -> Quantized:
        """Return the weight of some inputs. If the cut is inside a group, all groups get smaller.

        Raises ConfigurationError if the weight cannot be cut there.
        """

    @abstractmethod
    def dequantized(self) -> Tensor:
        """Return the weight, [out, in] fp32."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


Stored = Tensor | Quantized


@overload
def slice_rows(weight: Quantized, rows: range) -> Quantized: ...
@overload
def slice_rows(weight: Stored, rows: range) -> Stored: ...
def slice_rows(weight: Stored, rows: range) -> Stored:
    """Return the weight of some outputs, as a view."""
    if isinstance(weight, Tensor):
        return weight[rows.start : rows.stop]
    return weight.with_tensors(*(tensor[rows.start : rows.stop] for tensor in weight.tensors))


def slice_columns(weight: Stored, columns: range) -> Stored:
    """Return the weight of some inputs. Raises as `Quantized.of_columns` does."""
    if len(columns) == weight.shape[1]:
        return weight
    if isinstance(weight, Tensor):
        return weight[:, columns.start : columns.stop]
    return weight.of_columns(columns)


def select_rows(weight: Stored, rows: Tensor) -> Stored:
    """Return the weight of the outputs at `rows`, [n] int64."""
    if isinstance(weight, Tensor):
        return weight[rows.to(weight.device)]
    return weight.with_tensors(*(tensor[rows.to(tensor.device)] for tensor in weight.tensors))


class Format(ABC):
    """A weight [out, in] for one device."""

    num_bytes: int

    @abstractmethod
    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return [T, out] in the dtype of rows [T, in]. bias: [out], fp32 or that dtype."""

    def kernel(
        self, rows: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None
    ) -> Kernel[Any]:
        """Return the CPU library's kernel for `multiply`, as `kernels.cpu.linear.product` does.

        Raises NoKernelError if it has none.
        """
        raise NoKernelError(f"weights in the format {type(self).__name__} have no kernel")

    def kernels(
        self, rows: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None
    ) -> list[Kernel[Any]]:
        """Return the kernels that write all outputs. Arguments and errors: as of `kernel`."""
        return [self.kernel(rows, bias, out, residual)]


MakeFormat = Callable[[Sequence[Tensor]], Format]
"""Concatenate parts [out_i, in], which may be views of mapped files, into one weight."""


class Dense(Format):
    """A plain [out, in] tensor, on any device."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.num_bytes = weight.nbytes

    @classmethod
    def of(cls, parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Dense:
        """Concatenate parts [out_i, in], copying each one once."""
        num_rows = sum(len(part) for part in parts)
        weight = torch.empty(num_rows, parts[0].shape[1], device=device, dtype=dtype)
        start = 0
        for part in parts:
            weight[start : start + len(part)].copy_(part)
            start += len(part)
        return cls(weight)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(rows, self.weight, bias)


class Panels(Format):
    """A weight packed into panels for the C++ kernel; see `kernels.cpu.linear`.

    A weight that bf16 represents exactly is stored in bf16 even if rows are fp32, which halves the
    memory traffic and changes no result. For bf16 rows, panels hold pairs of inputs if the CPU can
    multiply bf16 pairs.
    """

    def __init__(self, panels: Tensor, num_columns: int) -> None:
        self.panels, self.num_columns = panels, num_columns
        self.num_bytes = panels.nbytes
        self._product = cpu_linear.Product(panels, num_columns)

    @classmethod
    def of(cls, parts: Sequence[Tensor], dtype: torch.dtype) -> Panels:
        """Pack parts [out_i, in]. dtype: dtype of the rows, fp32 or bf16."""
        stored = torch.bfloat16 if all(map(_fits_bf16, parts)) else dtype
        in_pairs = dtype == torch.bfloat16 and parts[0].shape[1] % 2 == 0 and cpu_linear.has_pairs()
        panels = cpu_linear.fill_panels(parts, stored, in_pairs=in_pairs)
        return cls(panels, sum(len(part) for part in parts))

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(rows, bias)

    def kernel(
        self, rows: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None
    ) -> Kernel[Any]:
        return cpu_linear.product(rows, self.panels, self.num_columns, bias, out, residual)


def choose_format(device: torch.device, dtype: torch.dtype) -> MakeFormat:
    """Return the fastest format for the device. dtype: dtype of the rows."""
    if uses_panels(device, dtype):
        return lambda parts: Panels.of(parts, dtype)
    return lambda parts: Dense.of(parts, device, dtype)


def uses_panels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in SUFFIXES and cpu_linear.is_faster()


@dataclass(frozen=True, slots=True)
class Part:
    """One of the checkpoint's linear layers within a merged `Linear`."""

    rows: slice
    """Its slice of the outputs."""
    order: Tensor | None = None
    """[out] int64: for each output, its row in the checkpoint; None: all rows in their order."""
    size: int | None = None
    """Number of rows in the checkpoint; None: as many as outputs."""


class Linear:
    """Maps rows [T, in] to [T, out], however the weight is stored.

    Layers with the same input (q, k and v; gate and up) are merged into one `Linear`; `parts` says
    which outputs belong to which layer. A process may hold only some of the outputs (the `order` of
    its parts says which), or only some of the inputs; then outputs are partial sums.
    """

    def __init__(
        self,
        format: Format,
        bias: Tensor | None,
        parts: Mapping[str, Part],
        in_features: int,
        dtype: torch.dtype,
        columns: range | None = None,
        after: Sequence[After] = (),
    ) -> None:
        """bias: [out]. parts: keyed by name in the checkpoint. dtype: dtype of the rows.

        in_features: inputs in the checkpoint. columns: the inputs that the rows have; None: all.
        after: what follows every product.
        """
        self.format = format
        self.bias = bias
        self.parts = parts
        self.in_features = in_features
        self.columns = columns or range(in_features)
        self.dtype = dtype
        self._after = tuple(after)
        self._is_product = not after

    def __call__(self, rows: Tensor) -> Tensor:
        outputs = self.format.multiply(rows, self.bias)
        for follow in self._after:
            outputs = follow(rows, outputs)
        return outputs

    def prepare(
        self,
        calls: StepCalls,
        rows: Tensor,
        out: Tensor,
        residual: Tensor | None = None,
        activation: str = "",
    ) -> None:
        """Add the product to `calls`, without what is attached. Raises NoKernelError.

        residual: [T, out], to which it is added, times `calls.residual_scale`; may be `out` itself.
        activation: '', or one of `kernels.cpu.elementwise.ACTIVATIONS`, of the product before that.
        """
        if not self._is_product:
            raise NoKernelError("more than a product makes its outputs")
        for kernel in self.format.kernels(rows, self.bias, out, residual):
            if activation:
                kernel.arguments.activation = ACTIVATIONS[activation]
            kernel.arguments.scale = calls.residual_scale
            calls.add(kernel)

    def attach(self, after: After) -> None:
        """Call `after` next after every product from now on, unless `prepare` computes it."""
        self._after = (after, *self._after)


def _fits_bf16(part: Tensor) -> bool:
    """Whether bf16 represents every element exactly. Checks 1,024 rows at a time to save memory."""
    return part.dtype == torch.bfloat16 or all(
        torch.equal(rows.bfloat16().to(rows.dtype), rows) for rows in part.split(1024)
    )
