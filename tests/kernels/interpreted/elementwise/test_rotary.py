"""rotary in Triton's interpreter, against its definition in fp64; see ../conftest.py."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import torch_elementwise
from kernels.elementwise.rotary import rotary
from tests.kernels.elementwise_inputs import TOLERANCE, strided


def angles(num_tokens, width, dtype, seed=5):
    """Return cos and sin [T, width] of independent random angles."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(num_tokens, width, generator=generator) * 7
    return angle.cos().to(dtype), angle.sin().to(dtype)


def exact(rows, cos, sin, rotary_dim):
    half = rotary_dim // 2
    cos, sin = (
        angles.double().repeat(1, rotary_dim // angles.shape[1])[:, None] for angles in (cos, sin)
    )
    turned, head = rows.double().clone(), rows.double()[..., :rotary_dim]
    rotated = torch.cat((-head[..., half:], head[..., :half]), -1)
    turned[..., :rotary_dim] = head * cos + rotated * sin
    return turned


def merged(num_tokens, num_heads, num_kv_heads, head_dim, dtype):
    """Return q, k and v side by side in the rows of one projection."""
    rows = strided(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    return rows.split((num_heads, num_kv_heads, num_kv_heads), 1)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"),
    [((4, 2), 64, 64), ((3, 1), 80, 80), ((33, 3), 128, 128), ((1, 1), 256, 256), ((2, 5), 8, 8),
     ((4, 2), 96, 72), ((4, 2), 64, 16)],
)  # fmt: skip
def test_against_fp64(heads, head_dim, rotary_dim, dtype):
    query, key, value = merged(5, *heads, head_dim, dtype)
    for width in (rotary_dim, rotary_dim // 2):
        cos, sin = angles(5, width, dtype)
        before = [rows.clone() for rows in (query, key, value)]
        twins = [rows.clone() for rows in before[:2]]
        rotary(query, key, cos, sin, rotary_dim)
        torch_elementwise.rotary(*twins, cos, sin, rotary_dim)
        for rows, old, twin in zip((query, key), before, twins, strict=False):
            expected = exact(old, cos, sin, rotary_dim)
            assert rows.isfinite().all()
            # Differences of products: the error is relative to the larger product.
            limit = 2 * TOLERANCE[dtype] * old.double().abs().amax((1, 2), keepdim=True)
            assert ((rows.double() - expected).abs() <= limit).all()
            assert torch.equal(rows[..., rotary_dim:], old[..., rotary_dim:])
            assert dtype == torch.float32 or torch.equal(rows, twin)
        assert torch.equal(value, before[2])


def test_no_tokens():
    query, cos = torch.zeros(0, 2, 8), torch.zeros(0, 8)
    rotary(query, query, cos, cos, 8)


HEADS, ANGLES = torch.zeros(3, 2, 8), torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("query", "cos", "rotary_dim", "message"),
    [
        (HEADS, ANGLES[:2], 8, "for 3 tokens"),
        (HEADS, ANGLES[:, :6], 8, "dims / 2"),
        (HEADS, torch.zeros(3, 10), 10, "rotary_dim=10 must be even, and at most head_dim=8"),
        (HEADS, ANGLES[:, :7], 7, "must be even"),
        (HEADS, ANGLES.half(), 8, "one type"),
        (HEADS[:, :1].expand(3, 2, 8), ANGLES, 8, "must not share memory"),
        (torch.zeros(3, 8, 2).transpose(1, 2), ANGLES, 8, "the last must be 1"),
    ],
)
def test_invalid_inputs(query, cos, rotary_dim, message):
    with pytest.raises(ValueError, match=message):
        rotary(query, query, cos, cos, rotary_dim)
    with pytest.raises(ValueError, match=message):
        rotary(torch.zeros(3, 1, query.shape[2], dtype=query.dtype), query, cos, cos, rotary_dim)
