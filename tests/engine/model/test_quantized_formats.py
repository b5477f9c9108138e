"""Formats of quantized weights: which device gets which, and what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.model.linear import Dense
from engine.model.quantization.at_load import quantize_weight
from engine.model.quantization.formats import (
    Dequantizing,
    PermutedInputs,
    ScaledFloat8,
    SideBySide,
    TritonCodes,
    make_format,
    quantized_format,
)
from engine.model.quantization.weights import Float8Weight, IntegerWeight, PermutedWeight
from kernels.cpu.linear import is_faster
from kernels.cpu.step_calls import StepCalls

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def quantized(precision="int8", shape=(32, 128), seed=0) -> Any:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return quantize_weight(weight, precision, CPU)


def permuted(seed=0):
    order = torch.randperm(128, generator=torch.Generator().manual_seed(seed))
    return PermutedWeight(quantized("int4", seed=seed), order)


def test_layers_of_one_kind_become_one_weight():
    parts = [quantized("fp8", shape=(size, 128), seed=size) for size in (16, 8)]
    format = make_format(parts, CPU, FP16)
    assert isinstance(format, Dequantizing)
    rows, bias = torch.randn(3, 128), torch.randn(24)
    weight = torch.cat([part.dequantized() for part in parts])
    torch.testing.assert_close(format.multiply(rows, bias), rows @ weight.T + bias)
    assert format.num_bytes == 24 * (128 + 4)


def test_formats_without_a_kernel_for_cpus_are_unpacked_once(monkeypatch):
    weight, rows = quantized("fp8", shape=(40, 128)), torch.randn(3, 128)
    for dtype in (FP32, BF16):
        format, plain = (make_format([w], CPU, dtype) for w in (weight, weight.dequantized()))
        assert type(format) is type(plain)
        assert torch.equal(
            format.multiply(rows.to(dtype), None), plain.multiply(rows.to(dtype), None)
        )
        assert format.num_bytes == plain.num_bytes


@pytest.mark.parametrize("bias", [None, torch.arange(96.0)])
def test_layers_of_different_kinds_stay_side_by_side(bias):
    """One layer among others is unquantized, or every layer has act-order with its own order."""
    for parts in (
        [quantized(), torch.randn(32, 128), quantized("int4")],
        [permuted(0), permuted(1), permuted(2)],
    ):
        format = make_format(parts, CPU, FP32, is_exact=True)
        assert isinstance(format, SideBySide)
        whole = [part if isinstance(part, torch.Tensor) else part.dequantized() for part in parts]
        rows = torch.randn(5, 128)
        expected = Dense(torch.cat(whole)).multiply(rows, bias)
        torch.testing.assert_close(format.multiply(rows, bias), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("capability", "precision", "dtype", "kind"),
    [
        ((8, 0), "fp8", BF16, TritonCodes),
        ((8, 9), "fp8", BF16, ScaledFloat8),
        ((9, 0), "fp8", FP16, TritonCodes),
        ((9, 0), "fp8", FP32, Dequantizing),
        ((8, 0), "int8", BF16, TritonCodes),
        ((9, 0), "int4", FP16, TritonCodes),
        ((9, 0), "int4", FP32, Dequantizing),
    ],
)
def test_the_format_depends_on_the_gpu(capability, precision, dtype, kind, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    weight = quantized(precision)
    assert isinstance(quantized_format(weight, CUDA, dtype), kind)
    monkeypatch.setattr("kernels.cpu.linear.is_faster", lambda: False)
    assert isinstance(quantized_format(weight, CPU, dtype), Dequantizing)


def test_rows_that_must_stay_exact_are_not_rounded_to_fp8(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    format = quantized_format(quantized("fp8"), CUDA, BF16, is_exact=True)
    assert isinstance(format, TritonCodes)


def test_groups_without_a_kernel_are_dequantized(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    assert isinstance(quantized_format(permuted(), CUDA, BF16), PermutedInputs)
    small = quantized("int4", shape=(8, 48))
    assert isinstance(small, IntegerWeight)
    assert small.group_size == 16
    assert isinstance(quantized_format(small, CUDA, BF16), Dequantizing)
    short = Float8Weight(torch.zeros(16, 160).to(torch.float8_e4m3fn), torch.ones(16, 2), 128)
    assert isinstance(quantized_format(short, CUDA, BF16), Dequantizing)


def test_kernel_weights_take_a_byte_or_half_a_byte():
    sizes = {"int8": 32 * (128 + 5), "int4": 32 * (64 + 5), "fp8": 32 * (128 + 4)}
    for precision, size in sizes.items():
        weight = quantized(precision)
        assert isinstance(weight, IntegerWeight | Float8Weight)
        assert TritonCodes(weight).num_bytes == size


@pytest.mark.skipif(not is_faster(), reason="the C++ kernels are not used here")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_layers_side_by_side_add_their_products_to_a_step(dtype):
    integers = [quantized("int8", (24, 128)), quantized("int4", (40, 128))]
    parts = integers if dtype == BF16 else [*integers, torch.randn(33, 128)]
    format = make_format(parts, CPU, dtype, is_exact=True)
    assert isinstance(format, SideBySide)
    width = sum(format.sizes)
    rows, residual = torch.randn(5, 128).to(dtype), torch.randn(5, width).to(dtype)
    bias = torch.randn(width)
    expected = format.multiply(rows, bias)
    for is_added in (False, True):
        calls = StepCalls(8, 128, dtype, [], [], [])
        calls.result = out = calls.buffer("out", width)
        out[:5] = residual
        for kernel in format.kernels(calls.hidden, bias, out, out if is_added else None):
            calls.add(kernel)
        total = expected + residual if is_added else expected
        torch.testing.assert_close(calls(rows, {}, []), total)
