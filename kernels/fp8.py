"""fp8 e4m3 as bytes, for GPUs whose compiler has no such type (before sm_89).

A code has one sign bit, four exponent bits (bias 7) and three mantissa bits; there is no infinity,
and 0x7F and 0xFF are NaN. Decoding moves the seven low bits to the four lowest exponent bits and
three highest mantissa bits of the wider type, and multiplies by a power of two that corrects the
exponent bias. This is exact for all 254 finite codes, including subnormals. Encoding gives the same
bits as `cvt.rn.satfinite.e4m3`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def decode_factor(dtype: torch.dtype) -> float:
    """Return the factor by which to multiply numbers that were read from a cache of `dtype`.

    It undoes the scaling of `e4m3_shrunk`. It is 1 for a cache that does not hold bytes.
    """
    return 2.0**8 if dtype == torch.uint8 else 1.0


@triton.jit
def e4m3_shrunk(codes):
    """Convert uint8 codes to fp16: to their exact values, multiplied by 2^-8.

    Triton's float8e4b15 has the bits of e4m3 with fp16's exponent bias, 15. Two codes at once are
    shifted into place, so this takes fewer instructions than `e4m3_decode`. Wrappers multiply
    `decode_factor` into scales that the kernel applies anyway.

    NOTE: the two NaN codes become ±480 * 2^-8; a check in the innermost loop would cost too much.
    """
    return codes.to(tl.float8e4b15, bitcast=True).to(tl.float16)


@triton.jit
def e4m3_decode(codes, dtype: tl.constexpr):
    """Convert uint8 codes to their exact values in `dtype` (fp16, bf16 or fp32).

    NOTE: the two NaN codes become ±480; a check in the innermost loop would cost too much.
    """
    if dtype == tl.float16:
        bits = codes.to(tl.uint16)
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        rebias = tl.full((), 2.0**8, tl.float16)
    elif dtype == tl.bfloat16:
        bits = codes.to(tl.uint16)
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 4)
        rebias = tl.full((), 2.0**120, tl.bfloat16)
    else:
        bits = codes.to(tl.uint32)
        moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        rebias = tl.full((), 2.0**120, tl.float32)
    return moved.to(dtype, bitcast=True) * rebias


@triton.jit
def e4m3_encode(values):
    """Convert fp32 to uint8 codes: nearest, ties to even, saturated at ±448; NaN stays NaN."""
    clamped = tl.clamp(values, -448.0, 448.0).to(tl.int32, bitcast=True)
    magnitude = clamped & 0x7FFFFFFF
    # Normal results: round to three mantissa bits, then change the exponent bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2**-6 a code counts multiples of 2**-9. Adding 2**23 puts this count in the low bits.
    multiples = magnitude.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    subnormal = multiples.to(tl.int32, bitcast=True) & 0xF
    codes = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((clamped >> 24) & 0x80)
    return tl.where(values == values, codes, 0x7F).to(tl.uint8)


@triton.jit
def to_cache_type(rows, scale, dtype: tl.constexpr):
    """Return `rows` as a cache of `dtype` stores them: fp8 holds rows * scale, saturated at ±448.

    Any other cache has the dtype of `rows`, and `scale` is ignored.
    """
    if dtype == tl.uint8:
        stored = e4m3_encode(rows.to(tl.float32) * scale)
    elif dtype == tl.float8e4nv:
        stored = (rows.to(tl.float32) * scale).to(tl.float8e4nv)
    else:
        stored = rows
    return stored
