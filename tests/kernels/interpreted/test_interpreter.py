"""The repaired interpreter computes what the other tests of this folder rely on."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def cast_kernel(source, target, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(target + index, tl.load(source + index).to(target.dtype.element_ty))


@triton.jit
def arithmetic_kernel(a, b, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x, y = tl.load(a + index), tl.load(b + index)
    tl.store(out + index, x + y)
    tl.store(out + SIZE + index, x * y)
    tl.store(out + 2 * SIZE + index, tl.where(x > y, x, y))
    tl.store(out + 3 * SIZE + index, tl.maximum(x, -y))
    tl.store(out + 4 * SIZE + index, tl.full((SIZE,), 1.5, x.dtype))


@triton.jit
def reduce_kernel(source, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    values = tl.load(source + index[:, None] * SIZE + index[None, :])
    tl.store(out + index, tl.max(values, axis=1))
    tl.store(out + SIZE + index, tl.sum(values, axis=1))


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    square = index[:, None] * SIZE + index[None, :]
    tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square)))


@triton.jit
def loop_kernel(num_trips, out):
    total = 0
    for trip in range(tl.load(num_trips)):
        total += trip
    tl.store(out, total)


@triton.jit
def integer_kernel(a, b, out, OPERATION: tl.constexpr):
    x, y = tl.load(a), tl.load(b)
    if OPERATION == "+":
        tl.store(out, x + y)
    elif OPERATION == "-":
        tl.store(out, x - y)
    else:
        tl.store(out, x * y)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8])
def test_casts_round_to_nearest_even_and_back_exactly(dtype):
    source = torch.cat([random(1000), random(1000) / 256, torch.zeros(48)])
    narrow, wide = torch.zeros(2048, dtype=dtype), torch.zeros(2048)
    cast_kernel[(1,)](source, narrow, SIZE=2048)
    cast_kernel[(1,)](narrow, wide, SIZE=2048)
    assert torch.equal(narrow.float(), source.to(dtype).float())
    assert torch.equal(wide, narrow.float())


@pytest.mark.parametrize("dtype", FP8)
def test_casts_to_fp8_saturate(dtype):
    source = torch.tensor([1e6, -1e6, 500.0, float("nan")])
    out = torch.zeros(4, dtype=dtype)
    cast_kernel[(1,)](source, out, SIZE=4)
    largest = torch.finfo(dtype).max
    assert out.float()[:2].tolist() == [largest, -largest]
    assert out.float()[3].isnan()


def test_arithmetic_of_bf16():
    a, b = random(64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16, seed=1)
    out = torch.zeros(5, 64, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](a, b, out, SIZE=64)
    expected = [a + b, a * b, a.maximum(b), a.maximum(-b), torch.full_like(a, 1.5)]
    assert torch.equal(out, torch.stack(expected))


def test_reductions_of_bf16():
    source = random(16, 16, dtype=torch.bfloat16)
    out = torch.zeros(2, 16, dtype=torch.bfloat16)
    reduce_kernel[(1,)](source, out, SIZE=16)
    assert torch.equal(out[0], source.amax(1))
    torch.testing.assert_close(out[1].float(), source.float().sum(1), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *FP8])
def test_dot(dtype):
    a, b, out = (
        random(16, 16, dtype=dtype),
        random(16, 16, dtype=dtype, seed=1),
        torch.zeros(16, 16),
    )
    dot_kernel[(1,)](a, b, out, SIZE=16)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_loops_with_a_bound_from_memory():
    out = torch.zeros(1, dtype=torch.int32)
    loop_kernel[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.item() == 10


@pytest.mark.parametrize(
    ("a", "operation", "b", "result"),
    [
        (2**31 - 2, "+", 1, 2**31 - 1),
        (2**31 - 1, "+", 1, None),
        (-(2**31), "-", 1, None),
        (2**16, "*", -(2**15), -(2**31)),
        (2**16, "*", 2**15, None),
    ],
)
def test_an_overflow_of_int32_is_an_error(a, operation, b, result):
    out = torch.zeros(1, dtype=torch.int32)
    operands = [torch.tensor([number], dtype=torch.int32) for number in (a, b)]
    if result is None:
        with pytest.raises(InterpreterError, match="int32 overflows"):
            integer_kernel[(1,)](*operands, out, OPERATION=operation)
    else:
        integer_kernel[(1,)](*operands, out, OPERATION=operation)
        assert out.item() == result
