"""The quantized weights of all experts in one projection."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.model.linear import Quantized, slice_rows
from engine.model.quantization.kernel_codes import KernelCodes, KernelWeight, has_kernel

ROWS_AT_ONCE = 4096
"""Rows that are dequantized in fp32 at a time, to save memory."""


class DequantizingExperts:
    """Weights that are dequantized for each product: slow but exact, and possible on every device.

    It is the reference for the kernel, and is used where the kernel cannot run.
    """

    def __init__(self, weights: Sequence[Quantized], num_experts: int, dtype: torch.dtype) -> None:
        """weights: already on their device. Together they are [experts * out, in], one expert after
        another. dtype: dtype of the rows."""
        self._parts = [
            slice_rows(weight, range(start, min(start + ROWS_AT_ONCE, weight.shape[0])))
            for weight in weights
            for start in range(0, weight.shape[0], ROWS_AT_ONCE)
        ]
        self._num_experts, self._dtype = num_experts, dtype
        self.num_bytes = sum(weight.num_bytes for weight in weights)

    def dense(self) -> Tensor:
        """Return the weights, [experts, out, in] in the dtype of the rows."""
        sizes, in_features = [part.shape[0] for part in self._parts], self._parts[0].shape[1]
        device = self._parts[0].tensors[0].device
        rows = torch.empty(sum(sizes), in_features, dtype=self._dtype, device=device)
        for place, part in zip(rows.split_with_sizes(sizes), self._parts, strict=True):
            place.copy_(part.dequantized())
        return rows.unflatten(0, (self._num_experts, -1))


class TritonExperts:
    """Codes for `kernels.linear.grouped_quantized_linear`, for rows in fp16 or bf16 on CUDA."""

    def __init__(self, weight: KernelWeight, num_experts: int, *, is_pinned: bool = False) -> None:
        """weight: [experts * out, in], expert by expert; `has_kernel` must be true of it.

        is_pinned: the bits of a row do not depend on the other rows.
        """
        # Imported only here, so that CPUs do not need Triton.
        from kernels.linear.grouped_quantized_linear import grouped_quantized_linear

        def by_group(tensor: Tensor) -> Tensor:
            """Return [experts, groups, out] for [experts * out, groups]."""
            return tensor.unflatten(0, (num_experts, -1)).transpose(1, 2).contiguous()

        laid_out = KernelCodes.of(weight)
        self._multiply = partial(grouped_quantized_linear, is_pinned=is_pinned)
        self._codes = laid_out.codes.unflatten(0, (num_experts, -1))
        self._scales = by_group(laid_out.scales)
        self._zeros = None if laid_out.zeros is None else by_group(laid_out.zeros)
        self._kind, self._group_size = laid_out.kind, laid_out.group_size
        self.num_bytes = laid_out.num_bytes

    def multiply(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the products [M, out] of rows [M, in] that are sorted by expert.

        ends: [experts] int32, the index after the last row of each expert.
        """
        return self._multiply(
            rows, self._codes, self._scales, self._zeros, ends, self._kind, self._group_size
        )


QuantizedExperts = DequantizingExperts | TritonExperts


def quantized_experts(
    weights: Sequence[Quantized],
    num_experts: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_pinned: bool = False,
) -> QuantizedExperts:
    """Return the fastest form for a device that the weights are already on.

    The other arguments are as in `DequantizingExperts` and `TritonExperts`.
    """
    if uses_kernel(device, dtype) and len(weights) == 1 and has_kernel(weights[0]):
        return TritonExperts(weights[0], num_experts, is_pinned=is_pinned)
    return DequantizingExperts(weights, num_experts, dtype)


def uses_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype != torch.float32
