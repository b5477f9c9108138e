"""Quantizes weights while they are loaded, without calibration data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.model.linear import Quantized
from engine.model.quantization.weights import MAX_FLOAT8, Float8Weight, IntegerWeight, joined

GROUP_SIZE = 128
MIN_GROUP_SIZE = 16
"""Smaller groups would need at least as many bytes for their scales as for their codes."""
ROWS_AT_ONCE = 1024


def quantize_weight(weight: Tensor, precision: str, device: torch.device) -> Quantized:
    """Quantize a weight [out, in], on the device, 1,024 outputs at a time to save memory.

    precision: a key of QUANTIZERS.
    """
    quantize = QUANTIZERS[precision]
    parts = [quantize(rows.to(device).float()) for rows in weight.split(ROWS_AT_ONCE)]
    (whole,) = joined(parts, device)
    return whole


def to_fp8(weight: Tensor) -> Float8Weight:
    """Round to e4m3, with a scale for each output."""
    scales = _nonzero(weight.abs().amax(1, keepdim=True) / MAX_FLOAT8)
    return Float8Weight((weight / scales).to(torch.float8_e4m3fn), scales, weight.shape[1])


def to_int8(weight: Tensor) -> IntegerWeight:
    """Round to -127 .. 127, with a scale for each output."""
    low, high = weight.aminmax(dim=1, keepdim=True)
    scales = _nonzero(torch.maximum(high, -low) / 127)
    codes = (weight / scales).round_().add_(128).to(torch.uint8)
    zeros = torch.full_like(scales, 128, dtype=torch.uint8)
    return IntegerWeight(codes, scales, zeros, 8, weight.shape[1])


def to_int4(weight: Tensor) -> IntegerWeight:
    """Round to 16 steps between the least and the largest value of each group of inputs.

    Groups have 128 inputs. If 128 does not divide the number of inputs, the groups have as many as
    the greatest common divisor of the two; if that is less than 16, all inputs are one group.
    """
    group_size = math.gcd(weight.shape[1], GROUP_SIZE)
    if group_size < MIN_GROUP_SIZE:
        group_size = weight.shape[1]
    groups = weight.unflatten(1, (-1, group_size))
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    scales = _nonzero((high - low) / 15)
    zeros = (-low / scales).round()
    codes = ((groups / scales).round() + zeros).clamp(0, 15).to(torch.uint8).flatten(1)
    return IntegerWeight(codes, scales.squeeze(-1), zeros.squeeze(-1).byte(), 4, group_size)


QUANTIZERS: Mapping[str, Callable[[Tensor], Quantized]] = {
    "fp8": to_fp8,
    "int8": to_int8,
    "int4": to_int4,
}
"""Functions of fp32 weights [out, in], by the value of option.quantize."""
HEAD_PRECISIONS: Mapping[str, str] = {"int8": "int8", "int4": "int8"}
"""The precision of the head, by the value of option.quantize. With other values, the head keeps
option.dtype.

Errors of the head's weights go straight into the logits, so it never has 4 bits.
"""


def _nonzero(scales: Tensor) -> Tensor:
    return scales.masked_fill(scales == 0, 1.0)
