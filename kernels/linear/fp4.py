"""MXFP4 as bytes: e2m1 codes, and one power of two (e8m0) for every 32 codes.

A code has one sign bit, two exponent bits (bias 1) and one mantissa bit. Decoding moves the three
low bits to the two lowest exponent bits and the highest mantissa bit of the wider type, and
multiplies by a power of two that corrects the exponent bias. This is exact for all 16 codes.
Source: OCP Microscaling Formats (MX) specification, version 1.0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1_decode(codes, dtype: tl.constexpr):
    """Convert uint8 codes, each 0 to 15, to their exact values in `dtype` (fp16 or bf16)."""
    bits = codes.to(tl.uint16)
    if dtype == tl.float16:
        moved = ((bits & 8) << 12) | ((bits & 7) << 9)
        rebias = tl.full((), 2.0**14, tl.float16)
    else:
        moved = ((bits & 8) << 12) | ((bits & 7) << 6)
        rebias = tl.full((), 2.0**126, tl.bfloat16)
    return moved.to(dtype, bitcast=True) * rebias


@triton.jit
def e8m0_decode(exponents):
    """Convert uint8 exponents to fp32, 2 ** (exponent - 127).

    NOTE: 255, which stands for NaN, becomes infinity.
    """
    bits = exponents.to(tl.int32) << 23
    # An exponent of 0 is 2**-127, which is subnormal in fp32.
    return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)
