"""Formats of `Linear` for quantized weights.

`make_format` chooses one. To add a kernel, write a format and choose it in `quantized_format`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.linear import Format, Panels, Quantized, Stored, choose_format, uses_panels
from engine.model.quantization.integers import Integers
from engine.model.quantization.kernel_codes import KernelCodes, KernelWeight, has_kernel
from engine.model.quantization.weights import (
    Float8Weight,
    IntegerWeight,
    OffsetWeight,
    PermutedWeight,
    joined,
)
from kernels.cpu.calls import Kernel

MAX_KERNEL_ROWS = 64
"""Rows up to which a product reads the codes themselves. With more, it takes longer than
dequantizing the weight and calling the library's product."""


class Dequantizing(Format):
    """Dequantizes the weight for each product: slow but exact, and possible on every device.

    It is the reference for the kernels, and is used where no kernel can run.
    """

    def __init__(self, weight: Quantized) -> None:
        self.weight = weight
        self.num_bytes = weight.num_bytes

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight.dequantized().to(rows.dtype)
        return F.linear(rows, weight, None if bias is None else bias.to(rows.dtype))


class TritonCodes(Format):
    """Codes for `kernels.linear.quantized_linear`, for rows in fp16 or bf16 on CUDA."""

    def __init__(self, weight: KernelWeight) -> None:
        """weight: `has_kernel` must be true for it."""
        # Imported only here, so that CPUs do not need Triton.
        from kernels.linear.dequantize import dequantize
        from kernels.linear.quantized_linear import quantized_linear

        laid_out = KernelCodes.of(weight)
        self.product = quantized_linear
        self._dequantize = dequantize
        self._codes, self._scales = laid_out.codes, laid_out.scales.T.contiguous()
        self._zeros = None if laid_out.zeros is None else laid_out.zeros.T.contiguous()
        self._kind, self._group_size = laid_out.kind, laid_out.group_size
        self.num_bytes = laid_out.num_bytes
        self.max_rows: float = MAX_KERNEL_ROWS

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        weight = self._codes, self._scales, self._zeros
        if len(rows) <= self.max_rows:
            return self.product(rows, *weight, bias, self._kind, self._group_size)
        dense = self._dequantize(*weight, self._kind, self._group_size, rows.dtype)
        return F.linear(rows, dense, None if bias is None else bias.to(rows.dtype))


class ScaledFloat8(Format):
    """FP8 rows times FP8 weights with one scale for each output (`torch._scaled_mm`).

    Each row is scaled so that its largest value becomes the largest e4m3 value, then rounded. Few
    rows are multiplied as they are, if a kernel can, which is faster.
    """

    def __init__(self, weight: Float8Weight) -> None:
        from kernels.linear.row_codes import row_codes

        self._row_codes = row_codes
        self._codes, self._scales = weight.codes.T, weight.scales.T.contiguous()
        self._few = TritonCodes(weight) if has_kernel(weight) else None
        self.num_bytes = weight.num_bytes

    @staticmethod
    def supports(weight: Quantized, dtype: torch.dtype) -> TypeGuard[Float8Weight]:
        """Whether torch multiplies rows of this dtype by the weight, on a device with FP8."""
        sizes = weight.shape
        is_scaled_by_output = isinstance(weight, Float8Weight) and weight.group_size == sizes[1]
        return is_scaled_by_output and dtype == torch.bfloat16 and not any(n % 16 for n in sizes)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if self._few and len(rows) <= MAX_KERNEL_ROWS:
            return self._few.multiply(rows, bias)
        codes, scales = self._row_codes(rows)
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            codes, self._codes, scales, self._scales, bias=bias, out_dtype=rows.dtype
        )


class PermutedInputs(Format):
    """A format whose weight has its columns in another order than the inputs."""

    def __init__(self, format: Format, order: Tensor) -> None:
        """order: [in] int64, the input of each column."""
        self.format, self.order = format, order
        self.num_bytes = format.num_bytes + order.nbytes

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return self.format.multiply(rows.index_select(1, self.order), bias)


class SideBySide(Format):
    """Layers with the same input that cannot be stored as one weight."""

    def __init__(self, formats: Sequence[Format], sizes: Sequence[int]) -> None:
        """sizes: the outputs of each format."""
        self.formats, self.sizes = formats, sizes
        self.num_bytes = sum(format.num_bytes for format in formats)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(self.sizes) if bias is None else bias.split_with_sizes(self.sizes)
        products = [
            format.multiply(rows, part) for format, part in zip(self.formats, biases, strict=True)
        ]
        return torch.cat(products, 1)

    def kernels(
        self, rows: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None
    ) -> list[Kernel[Any]]:
        found: list[Kernel[Any]] = []
        start = 0
        for format, size in zip(self.formats, self.sizes, strict=True):
            part = slice(start, start + size)
            own_bias = None if bias is None else bias[part]
            own_residual = None if residual is None else residual[:, part]
            found += format.kernels(rows, own_bias, out[:, part], own_residual)
            start += size
        return found


def make_format(
    parts: Sequence[Stored], device: torch.device, dtype: torch.dtype, *, is_exact: bool = False
) -> Format:
    """Return parts [out_i, in] as one layer, in the fastest format for the device.

    dtype: dtype of the rows. is_exact: rows are not to be rounded further for a product.
    """
    dense = [part for part in parts if isinstance(part, Tensor)]
    if len(dense) == len(parts):
        return choose_format(device, dtype)(dense)
    if dense:
        formats = [make_format([part], device, dtype, is_exact=is_exact) for part in parts]
    else:
        weights = joined([part for part in parts if not isinstance(part, Tensor)], device)
        formats = [quantized_format(weight, device, dtype, is_exact=is_exact) for weight in weights]
    if len(formats) == 1:
        return formats[0]
    return SideBySide(formats, [part.shape[0] for part in parts])


def quantized_format(
    weight: Quantized, device: torch.device, dtype: torch.dtype, *, is_exact: bool = False
) -> Format:
    """Return the fastest format for a device that the weight is already on.

    dtype, is_exact: as in `make_format`.
    """
    if isinstance(weight, PermutedWeight):
        format = quantized_format(weight.weight, device, dtype, is_exact=is_exact)
        return PermutedInputs(format, weight.order)
    if uses_panels(device, dtype):
        if isinstance(weight, IntegerWeight | OffsetWeight) and Integers.supports(weight):
            return Integers.of(weight, is_exact=is_exact)
        return Panels.of([weight.dequantized()], dtype)  # the memory of an unquantized weight
    if isinstance(weight, OffsetWeight):
        return choose_format(device, dtype)([weight.dequantized()])
    if device.type != "cuda" or dtype == torch.float32:
        return Dequantizing(weight)
    has_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    if has_fp8 and not is_exact and ScaledFloat8.supports(weight, dtype):
        return ScaledFloat8(weight)
    return TritonCodes(weight) if has_kernel(weight) else Dequantizing(weight)
