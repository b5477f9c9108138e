"""Quantized weights as they are read, before a format lays them out for a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from engine.model.linear import Quantized
from engine.shard import cannot_split

_SCATTERED = "their groups have inputs all over the layer (act-order) or too few"


@dataclass(frozen=True, slots=True)
class _Coded(Quantized):
    """A weight whose tensors are fields."""

    codes: Tensor
    fields: ClassVar[tuple[str, ...]] = ("codes", "scales")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.fields)

    def with_tensors(self, *tensors: Tensor) -> Self:
        return replace(self, **dict(zip(self.fields, tensors, strict=True)))


@dataclass(frozen=True, slots=True)
class IntegerWeight(_Coded):
    """A weight [out, in], `(codes - zeros) * scales`, with a zero and a scale per group of inputs.

    Symmetric int8 q is stored as the code q + 128 with the zero 128, so that all integer
    weights have one form. codes: [out, in] uint8, each from 0 to 2**bits - 1.
    """

    scales: Tensor
    """[out, in / group_size] fp32."""
    zeros: Tensor
    """[out, in / group_size] uint8."""
    bits: int
    """4 or 8."""
    group_size: int
    """Inputs that share a scale; all of them if each row has one scale (per channel)."""
    fields: ClassVar[tuple[str, ...]] = ("codes", "scales", "zeros")

    @property
    def kind(self) -> tuple[object, ...]:
        return IntegerWeight, self.bits, self.group_size

    def dequantized(self) -> Tensor:
        grouped = self.codes.unflatten(1, (-1, self.group_size)).float()
        return ((grouped - self.zeros[..., None].float()) * self.scales[..., None]).flatten(1)

    def of_columns(self, columns: range) -> IntegerWeight:
        size, scales, zeros = _cut_groups(self, columns, self.scales, self.zeros)
        codes = self.codes[:, columns.start : columns.stop]
        return IntegerWeight(codes, scales, zeros, self.bits, size)


@dataclass(frozen=True, slots=True)
class OffsetWeight(_Coded):
    """A weight [out, in], `codes * scales - minimums`, with a scale and a minimum per group.

    codes: [out, in] uint8, each from 0 to 2**bits - 1. It is unpacked where no kernel takes it.
    """

    scales: Tensor
    """[out, in / group_size] fp32."""
    minimums: Tensor
    """[out, in / group_size] fp32."""
    bits: int
    """4 or 8."""
    group_size: int
    """Inputs that share a scale."""
    fields: ClassVar[tuple[str, ...]] = ("codes", "scales", "minimums")

    @property
    def kind(self) -> tuple[object, ...]:
        return OffsetWeight, self.bits, self.group_size

    def dequantized(self) -> Tensor:
        grouped = self.codes.unflatten(1, (-1, self.group_size)).float()
        return (grouped * self.scales[..., None] - self.minimums[..., None]).flatten(1)

    def of_columns(self, columns: range) -> OffsetWeight:
        size, scales, minimums = _cut_groups(self, columns, self.scales, self.minimums)
        codes = self.codes[:, columns.start : columns.stop]
        return OffsetWeight(codes, scales, minimums, self.bits, size)


MAX_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Float8Weight(_Coded):
    """A weight [out, in], `codes * scales`, with a scale per group of inputs.

    codes: [out, in] float8_e4m3fn.
    """

    scales: Tensor
    """[out, ceil(in / group_size)] fp32. A block's scale is repeated for each of its outputs, so
    that layers whose sizes are not multiples of the block can be joined."""
    group_size: int
    """Inputs that share a scale; the last group may be shorter."""

    @property
    def kind(self) -> tuple[object, ...]:
        return Float8Weight, self.group_size

    def dequantized(self) -> Tensor:
        scales = self.scales.repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]
        return self.codes.float() * scales

    def of_columns(self, columns: range) -> Float8Weight:
        size, scales = _cut_groups(self, columns, self.scales)
        return Float8Weight(self.codes[:, columns.start : columns.stop], scales, size)


MXFP4_GROUP = 32
"""Inputs that share an exponent."""


@dataclass(frozen=True, slots=True)
class Float4Weight(_Coded):
    """A weight [out, in] in MXFP4: e2m1 codes, with a power of two for each 32 inputs.

    codes: [out, in / 2] uint8, two codes a byte, the earlier input in the lower half.

    Source: OCP Microscaling Formats (MX) specification, version 1.0.
    """

    exponents: Tensor
    """[out, in / 32] uint8, with a bias of 127."""
    fields: ClassVar[tuple[str, ...]] = ("codes", "exponents")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], 2 * self.codes.shape[1]))

    @property
    def kind(self) -> tuple[object, ...]:
        return (Float4Weight,)

    def dequantized(self) -> Tensor:
        groups = _e2m1(unpack_neighbours(self.codes)).unflatten(1, (-1, MXFP4_GROUP))
        return torch.ldexp(groups, self.exponents[..., None].int() - 127).flatten(1)

    def of_columns(self, columns: range) -> Float4Weight:
        first, last = columns.start, columns.stop
        if first % MXFP4_GROUP or last % MXFP4_GROUP:
            raise cannot_split(_SCATTERED)
        groups = self.exponents[:, first // MXFP4_GROUP : last // MXFP4_GROUP]
        return Float4Weight(self.codes[:, first // 2 : last // 2], groups)


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
class PermutedWeight(Quantized):
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

    def with_tensors(self, *tensors: Tensor) -> PermutedWeight:
        order = self.order.to(tensors[0].device)
        return PermutedWeight(self.weight.with_tensors(*tensors), order)

    def dequantized(self) -> Tensor:
        """Return the weight, [out, in] fp32, with its columns in the order of the inputs."""
        sorted_columns = self.weight.dequantized()
        return torch.empty_like(sorted_columns).index_copy_(1, self.order, sorted_columns)

    def of_columns(self, columns: range) -> PermutedWeight:
        raise cannot_split(_SCATTERED)


def _cut_groups(
    weight: IntegerWeight | OffsetWeight | Float8Weight, columns: range, *of_groups: Tensor
) -> tuple[int, *tuple[Tensor, ...]]:
    """Cut the tensors [out, groups] to `columns`; return the new group size and the cut tensors.

    The new groups are small enough to begin and end where the columns do.
    """
    group_size = weight.group_size
    if group_size >= weight.shape[1]:
        return len(columns), *of_groups
    size = math.gcd(group_size, columns.start, columns.stop)
    cut = slice(columns.start // size, columns.stop // size)
    return size, *(tensor.repeat_interleave(group_size // size, 1)[:, cut] for tensor in of_groups)


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
