"""Norm, activation and rotary compiled for every GPU: 16-byte loads and stores, no spills.

LONGSHORE_ALL_VARIANTS=1 checks the whole matrix and not a sample of it (`make variants`).
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels import dry_run
from kernels.elementwise.gated_activation import gated_activation
from kernels.elementwise.rms_norm import MAX_WIDTH, add_rms_norm, rms_norm
from kernels.elementwise.rotary import rotary
from tests.kernels.compiled.gpus import ALL, ARCHS
from tests.kernels.compiled.static_check import facts, faults

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (896, 2304, 4096, 5120, 8192, 16384, MAX_WIDTH)
HEADS = ((32, 8), (32, 32), (14, 2), (71, 1), (64, 4))
DIMS = (64, 80, 96, 128, 192, 256)
GEMMA = {"offset": 1.0, "rounds_first": False}


def norms():
    """Return (shape of a token, dtype, options) for norms of whole tokens and of heads."""
    if not ALL:
        return [
            ((4096,), torch.bfloat16, {}),
            ((MAX_WIDTH,), torch.float32, GEMMA),
            ((8, 128), torch.bfloat16, GEMMA),
        ]
    shapes = [*((width,) for width in WIDTHS), *((8, dim) for dim in DIMS)]
    return product(shapes, DTYPES, ({}, GEMMA))


def gates():
    """Return (width, dtype, activation)."""
    if not ALL:
        return [(14336, torch.bfloat16, "silu"), (4864, torch.float32, "gelu_tanh")]
    return product((1408, 11008, 14336), DTYPES, ("silu", "gelu_tanh"))


def rotaries():
    """Return (heads and KV heads, head_dim, rotary_dim, width of cos, dtype)."""
    bf16 = torch.bfloat16
    if not ALL:
        return [((32, 8), 128, 128, 128, bf16), ((71, 1), 80, 80, 80, torch.float32)]
    return [
        *((HEADS[0], dim, dim, dim, dtype) for dim, dtype in product(DIMS, DTYPES)),
        *((heads, 128, 128, 128, bf16) for heads in HEADS[1:]),
        (HEADS[0], 128, 96, 96, bf16),  # a part of each head
        (HEADS[0], 64, 64, 32, bf16),  # cos of one half, for both halves
    ]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_rms_norm(arch):
    for shape, dtype, options in norms():
        weights = [torch.empty(shape[-1], dtype=dtype)]
        if len(shape) == 2:  # also a weight for each head
            weights.append(torch.empty(shape, dtype=dtype))
        for weight in weights:
            with dry_run.target(arch) as launches:
                rms_norm(apart(*shape, dtype=dtype), weight, 1e-6, **options)
            check(launches, arch, (shape, dtype, options, weight.ndim))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_add_rms_norm(arch):
    for shape, dtype, options in norms():
        if len(shape) > 1:
            continue  # heads have no residual
        with dry_run.target(arch) as launches:
            weight = torch.empty(shape[-1], dtype=dtype)
            rows = (apart(*shape, dtype=dtype) for _ in range(2))
            add_rms_norm(*rows, weight, 1e-6, **options)
        check(launches, arch, (shape, dtype, options))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_gated_activation(arch):
    for width, dtype, activation in gates():
        with dry_run.target(arch) as launches:
            gated_activation(apart(2 * width, dtype=dtype), activation)
        check(launches, arch, (width, dtype, activation))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_rotary(arch):
    for (heads, kv_heads), dim, rotary_dim, width, dtype in rotaries():
        rows = apart(heads + 2 * kv_heads, dim, dtype=dtype)
        query, key, _ = rows.split((heads, kv_heads, kv_heads), 1)
        cos, sin = torch.empty(2, 5, width, dtype=dtype)
        with dry_run.target(arch) as launches:
            rotary(query, key, cos, sin, rotary_dim)
        check(launches, arch, (heads, kv_heads, dim, rotary_dim, width, dtype))
        # Older GPUs multiply in bf16 by fma, too, with zero.
        assert arch < 90 or "fma" not in launches[0].kernel.asm["ptx"], "a product is not rounded"


def apart(*shape, dtype):
    """Return five tokens whose stride is larger than their width."""
    return torch.empty(5, shape[0] + 16, *shape[1:], dtype=dtype)[:, : shape[0]]


def check(launches, arch, variant):
    (launch,) = launches
    found = facts(launch.kernel)
    assert not faults(launch.kernel, arch), (variant, found)
    assert min(found.wide_loads, found.wide_stores) > 0, (variant, found)
    assert max(found.narrow_loads, found.narrow_stores) == 0, (variant, found)
