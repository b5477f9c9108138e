"""The e4m3 conversion in Triton's interpreter, against torch's; see ../conftest.py."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.fp8 import decode_factor, e4m3_decode, e4m3_encode, e4m3_shrunk


@triton.jit
def decode_kernel(codes_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    values = e4m3_decode(tl.load(codes_ptr + index), out_ptr.dtype.element_ty)
    tl.store(out_ptr + index, values)


@triton.jit
def shrunk_kernel(codes_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, e4m3_shrunk(tl.load(codes_ptr + index)))


@triton.jit
def encode_kernel(values_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + index, e4m3_encode(tl.load(values_ptr + index)))


def encode(values):
    codes = torch.empty(len(values), dtype=torch.uint8)
    encode_kernel[(len(values) // 1024,)](values, codes, SIZE=1024)
    return codes


def expected_codes(values):
    """Convert with torch. Numbers are saturated first, as not every version of torch saturates."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_finite_code_decodes_exactly(dtype):
    codes = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, dtype=dtype)
    decode_kernel[(1,)](codes, out, SIZE=256)
    check_all_codes(out.float(), codes)


def test_every_finite_code_shrinks_exactly():
    codes = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, dtype=torch.float16)
    shrunk_kernel[(1,)](codes, out, SIZE=256)
    check_all_codes(out.float() * decode_factor(torch.uint8), codes)


def check_all_codes(got, codes):
    exact = codes.view(torch.float8_e4m3fn).float()
    finite = exact.isfinite()
    assert finite.sum() == 254
    assert torch.equal(got[finite], exact[finite])
    assert (got[~finite].abs() == 480).all()


def test_every_code_survives_decoding_and_encoding():
    exact = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    codes = encode(exact.repeat(4))[:256]
    assert torch.equal(codes[exact.isfinite()], torch.arange(256).to(torch.uint8)[exact.isfinite()])
    assert (codes[exact.isnan()] & 0x7F == 0x7F).all()


def test_numbers_of_all_sizes_round_as_in_torch():
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randn(2**18, generator=generator)
    exponents = torch.randint(-14, 12, (2**18,), generator=generator)
    values = torch.ldexp(mantissas, exponents)
    assert torch.equal(encode(values), expected_codes(values))


def test_ties_and_their_neighbours_round_as_in_torch():
    finite = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (finite[:-1] + finite[1:]) / 2
    near = [torch.nextafter(ties, torch.tensor(side)) for side in (0.0, 1e9)]
    values = torch.cat([finite, ties, *near])
    values = torch.cat([values, -values, torch.zeros(1024 - 2 * len(values))])
    assert torch.equal(encode(values), expected_codes(values))


def test_large_numbers_saturate_and_nan_stays():
    values = torch.tensor([448.0, 449, 464, 465, 1e30, float("inf"), float("nan"), 0.0])
    values = torch.cat([values, -values]).repeat(64)
    codes = encode(values)[:16].tolist()
    assert codes[:8] == [0x7E] * 6 + [0x7F, 0]
    assert codes[8:14] == [0xFE] * 6
    assert codes[14:] == [0x7F, 0x80]
