"""Quantized weights as they are read, before a format lays them out for a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight [out, in], `(codes - zeros) * scales`, with a zero and a scale per group of inputs.

    Symmetric int8 q is stored as the code q + 128 with the zero 128, so that all integer
    weights have one form.
    """

    codes: Tensor
    """[out, in] uint8, each from 0 to 2**bits - 1."""
    scales: Tensor
    """[out, in / group_size] fp32."""
    zeros: Tensor
    """[out, in / group_size] uint8."""
    bits: int
    """4 or 8."""
    group_size: int
    """Inputs that share a scale; all of them if each row has one scale (per channel)."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def kind(self) -> tuple[object, ...]:
        """Weights of equal kind can be joined row by row."""
        return IntegerWeight, self.bits, self.group_size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors; each has a row for every output."""
        return self.codes, self.scales, self.zeros

    def with_tensors(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> IntegerWeight:
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def dequantized(self) -> Tensor:
        """Return the weight, [out, in] fp32."""
        grouped = self.codes.unflatten(1, (-1, self.group_size)).float()
        return ((grouped - self.zeros[..., None].float()) * self.scales[..., None]).flatten(1)


MAX_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A weight [out, in], `codes * scales`, with a scale per group of inputs."""

    codes: Tensor
    """[out, in] float8_e4m3fn."""
    scales: Tensor
    """[out, ceil(in / group_size)] fp32. A block's scale is repeated for each of its outputs, so
    that layers whose sizes are not multiples of the block can be joined."""
    group_size: int
    """Inputs that share a scale; the last group may be shorter."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def kind(self) -> tuple[object, ...]:
        return Float8Weight, self.group_size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales

    def with_tensors(self, codes: Tensor, scales: Tensor) -> Float8Weight:
        return replace(self, codes=codes, scales=scales)

    def dequantized(self) -> Tensor:
        """Return the weight, [out, in] fp32."""
        scales = self.scales.repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]
        return self.codes.float() * scales


MXFP4_GROUP = 32
"""Inputs that share an exponent."""


@dataclass(frozen=True, slots=True)
class Float4Weight:
    """A weight [out, in] in MXFP4: e2m1 codes, with a power of two for each 32 inputs.

    Source: OCP Microscaling Formats (MX) specification, version 1.0.
    """

    codes: Tensor
    """[out, in / 2] uint8: two codes a byte, the earlier input in the lower half."""
    exponents: Tensor
    """[out, in / 32] uint8, with a bias of 127."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], 2 * self.codes.shape[1]))

    @property
    def kind(self) -> tuple[object, ...]:
        return (Float4Weight,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.exponents

    def with_tensors(self, codes: Tensor, exponents: Tensor) -> Float4Weight:
        return Float4Weight(codes, exponents)

    def dequantized(self) -> Tensor:
        """Return the weight, [out, in] fp32."""
        groups = _e2m1(unpack_neighbours(self.codes)).unflatten(1, (-1, MXFP4_GROUP))
        return torch.ldexp(groups, self.exponents[..., None].int() - 127).flatten(1)


def unpack_neighbours(codes: Tensor) -> Tensor:
    """Unpack codes [out, in / 2] of a `Float4Weight`: [out, in] uint8, each 0 to 15."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(1)


def _e2m1(codes: Tensor) -> Tensor:
    """Return the fp32 values of codes, each 0 to 15: a sign, two exponent bits, a mantissa bit.

    NOTE: a table of values would be a copy from the host, which no CUDA graph can capture.
    """
    exponents, mantissas = (codes >> 1 & 3).int(), (codes & 1).float()
    signs = 1 - 2 * (codes >> 3).float()
    halves = torch.where(exponents > 0, mantissas + 2, mantissas)
    return signs * torch.ldexp(halves, exponents.clamp(min=1) - 2)


@dataclass(frozen=True, slots=True)
class PermutedWeight:
    """A weight whose columns are sorted by group: GPTQ's act-order."""

    weight: IntegerWeight
    order: Tensor
    """[in] int64: column c of `weight` belongs to input order[c]."""

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def kind(self) -> tuple[object, ...]:
        return PermutedWeight, id(self)  # each has an order of its own

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.weight.tensors

    def with_tensors(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> PermutedWeight:
        order = self.order.to(codes.device)
        return PermutedWeight(self.weight.with_tensors(codes, scales, zeros), order)

    def dequantized(self) -> Tensor:
        """Return the weight, [out, in] fp32, with its columns in the order of the inputs."""
        sorted_columns = self.weight.dequantized()
        return torch.empty_like(sorted_columns).index_copy_(1, self.order, sorted_columns)


Quantized = IntegerWeight | Float8Weight | Float4Weight | PermutedWeight
Stored = Tensor | Quantized
"""A weight [out, in] as a checkpoint stores it."""


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
    """Return the weight of some inputs. If the cut falls inside a group, all groups get smaller.

    Raises ConfigurationError if the weight cannot be cut there.
    """
    cut = slice(columns.start, columns.stop)
    if len(columns) == weight.shape[1]:
        return weight
    match weight:
        case Tensor():
            return weight[:, cut]
        case IntegerWeight():
            size, scales, zeros = _cut_groups(
                weight.group_size, weight.shape[1], columns, weight.scales, weight.zeros
            )
            return IntegerWeight(weight.codes[:, cut], scales, zeros, weight.bits, size)
        case Float8Weight():
            size, scales = _cut_groups(weight.group_size, weight.shape[1], columns, weight.scales)
            return Float8Weight(weight.codes[:, cut], scales, size)
        case Float4Weight() if columns.start % MXFP4_GROUP == columns.stop % MXFP4_GROUP == 0:
            groups = slice(columns.start // MXFP4_GROUP, columns.stop // MXFP4_GROUP)
            codes = weight.codes[:, columns.start // 2 : columns.stop // 2]
            return Float4Weight(codes, weight.exponents[:, groups])
        case _:
            raise ConfigurationError(
                "the weights cannot be split over ranks, because their groups have inputs all over "
                "the layer (act-order) or too few; set option.tensor_parallel_degree=1"
            )


def _cut_groups(
    group_size: int, num_columns: int, columns: range, *of_groups: Tensor
) -> tuple[int, *tuple[Tensor, ...]]:
    """Cut the tensors [out, groups] to `columns`; return the new group size and the cut tensors.

    The new groups are small enough to begin and end where the columns do.
    """
    if group_size >= num_columns:
        return len(columns), *of_groups
    size = math.gcd(group_size, columns.start, columns.stop)
    cut = slice(columns.start // size, columns.stop // size)
    return size, *(tensor.repeat_interleave(group_size // size, 1)[:, cut] for tensor in of_groups)


def select_rows(weight: Stored, rows: Tensor) -> Stored:
    """Return the weight of the outputs at `rows`, [n] int64."""
    if isinstance(weight, Tensor):
        return weight[rows.to(weight.device)]
    return weight.with_tensors(*(tensor[rows.to(tensor.device)] for tensor in weight.tensors))


def num_bytes(weight: Quantized) -> int:
    return sum(tensor.nbytes for tensor in weight.tensors)


def joined(weights: Sequence[Quantized], device: torch.device) -> list[Quantized]:
    """Copy weights to the device, as one weight if they are of one kind.

    The copies are never views of mapped files.
    """
    groups = [weights]
    if len({weight.kind for weight in weights}) > 1:
        groups = [[weight] for weight in weights]
    return [
        group[0].with_tensors(
            *(
                torch.cat([part.to(device) for part in parts])
                for parts in zip(*(weight.tensors for weight in group), strict=True)
            )
        )
        for group in groups
    ]
