"""The kernels of a step in one call against the same kernels called one by one, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from kernels.attention.batch import PagedBatch
from kernels.cpu import step_calls
from kernels.cpu.attention import paged_attention
from kernels.cpu.cache import write_kv
from kernels.cpu.calls import NoKernelError, run
from kernels.cpu.elementwise import gated, gated_activation, norm, rms_norm, rotary, rotation
from kernels.cpu.integers import integer_linear, integer_product, rounds_rows, to_integer_panels
from kernels.cpu.linear import has_pairs, linear, product
from kernels.cpu.step_calls import StepCalls
from tests.kernels.cpu.panels import to_pairs, to_panels

HIDDEN = 48
SIZES = (1, 7, 50)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request):
    return request.param


@pytest.fixture
def make(dtype):
    """Return a function that makes a linear layer from its numbers of inputs and outputs.

    It returns two functions: one returns the layer's kernel, the other the layer's outputs.
    """
    generator = torch.Generator().manual_seed(3)

    def make(depth, num_columns):
        weight = torch.randn(num_columns, depth, generator=generator) / depth**0.5
        panels = (to_pairs if dtype == torch.bfloat16 and has_pairs() else to_panels)(
            weight.to(dtype)
        )
        layer = {"panels": panels, "num_columns": num_columns}
        layer["bias"] = torch.randn(num_columns, generator=generator)
        return partial(product, **layer), partial(linear, **layer)

    return make


def rows(num_rows, width, dtype):
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(make, dtype, activation):
    """Each result overwrites its gate, and the next product reads rows that lie apart."""
    (gate_up, own_gate_up), (down, own_down) = make(HIDDEN, 2 * 64), make(64, HIDDEN)
    for size in SIZES:
        x, inner = rows(size, HIDDEN, dtype), torch.empty(size, 2 * 64, dtype=dtype)
        expected = own_down(gated_activation(own_gate_up(x), activation))
        run(gate_up(x, out=inner))
        run(gated(*inner.chunk(2, 1), activation=activation, out=inner[:, :64]))
        run(down(inner[:, :64], out=x))
        assert torch.equal(x, expected)


@pytest.mark.parametrize(("num_columns", "scale"), [(33, 1.0), (64, 1.0), (64, 0.22)])
def test_rounded_products_are_added_to_a_residual(make, dtype, num_columns, scale):
    kernel, own = make(HIDDEN, num_columns)
    for size in SIZES:
        x, residual = rows(size, HIDDEN, dtype), rows(size, num_columns, dtype)
        out = torch.empty_like(residual)
        expected = torch.add(residual, own(x), alpha=scale)
        for target in (out, residual):
            adding = kernel(x, out=target, residual=residual)
            adding.arguments.scale = torch.tensor(scale, dtype=dtype).item()
            run(adding)
            assert torch.equal(target, expected)
        run(kernel(x, out=out))
        assert torch.equal(out, own(x))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_weights(dtype, bits):
    codes = torch.randint(2**bits, (40, HIDDEN), dtype=torch.uint8)
    scales, zeros = torch.rand(40, 3), torch.full((40, 3), 7, dtype=torch.uint8)
    panels, bias = to_integer_panels(codes, scales, zeros, bits, 16), torch.randn(40)
    for is_rounded in {False, rounds_rows()}:
        for size in SIZES:
            x, out = rows(size, 3 * HIDDEN, dtype)[:, :HIDDEN], rows(size, 40, dtype)
            expected = integer_linear(x, panels, bias, is_rounded=is_rounded) + out
            run(integer_product(x, panels, bias, out, out, is_rounded=is_rounded))
            assert torch.equal(out, expected)


def test_strided_rows(make, dtype):
    kernel, own = make(HIDDEN, 64)
    x, out = rows(7, 3 * HIDDEN, dtype)[:, :HIDDEN], torch.empty(7, 64, dtype=dtype)
    run(kernel(x, out=out))
    assert torch.equal(out, own(x))


def test_norm(dtype):
    weight = rows(1, HIDDEN, dtype)[0]
    forms: list[Any] = [{}, {"rounds_first": False}, {"offset": 1.0, "rounds_first": False}]
    for form in forms:
        for size in SIZES:
            x, out = rows(size, HIDDEN, dtype), torch.empty(size, HIDDEN, dtype=dtype)
            expected = rms_norm(x, weight, 1e-5, **form)
            run(norm(x, weight, 1e-5, out, **form))
            assert torch.equal(out, expected)
            residual = x.flip(0).contiguous()
            run(norm(x, weight, 1e-5, out, residual, **form))
            torch.testing.assert_close(out, residual + expected)


def prepare_attention(calls, layer, qkv, out, sizes, rotary_dim, norms=None, **options):
    """Add self-attention of `calls.hidden`, which its output overwrites. sizes: heads, KV heads,
    head dim. norms: of queries and of keys."""
    num_heads, num_kv_heads, dim = sizes
    widths = [count * dim for count in (num_heads, num_kv_heads, num_kv_heads)]
    merged = calls.buffer("inner", sum(widths))
    calls.add(qkv(calls.hidden, out=merged))
    parts = list(merged.split_with_sizes(widths, -1))
    for index, weight in enumerate(norms or ()):
        normed = calls.buffer(f"normed {index}", widths[index])
        by_head = (-1, len(weight))
        pair = parts[index].unflatten(1, by_head), normed.unflatten(1, by_head)
        calls.add(norm(pair[0], weight, 1e-5, pair[1]))
        parts[index] = normed
    query, key, value = (part.unflatten(1, (-1, dim)) for part in parts)
    if rotary_dim:
        calls.rotate("", query, key, rotary_dim)
    attended = calls.attend(layer, query, key, value, **options)
    calls.add(out(attended.flatten(1), out=calls.hidden))


@pytest.mark.parametrize(
    "extras",
    [
        {}, {"window": 3}, {"softcap": 2.0}, {"sinks": True},
        {"norms": "head"}, {"norms": "row"}, {"rotary_dim": 0},
    ],
)  # fmt: skip
@pytest.mark.parametrize("set_bytes", [step_calls.SET_BYTES, 64])
def test_attention(make, dtype, extras, set_bytes, monkeypatch):
    """Three steps of other sizes, each with a decode and a chunk. The one call and the single
    kernels have a cache each. With sets of 64 bytes, the rows of all buffers lie apart."""
    monkeypatch.setattr(step_calls, "SET_BYTES", set_bytes)
    num_heads, num_kv_heads, dim, rotary_dim = 4, 2, 64, extras.get("rotary_dim", 32)
    width = (num_heads + 2 * num_kv_heads) * dim
    (qkv, own_qkv), (out, own_out) = make(HIDDEN, width), make(num_heads * dim, HIDDEN)
    spread = [4, 2] if extras.get("norms") == "row" else [1, 1]
    weights = [
        rows(1, dim * count, dtype)[0] + shift
        for count, shift in zip(spread, (0.5, 1.5), strict=True)
    ]
    norms = weights if "norms" in extras else None
    options = {"scale": 0.2, **{k: v for k, v in extras.items() if k in ("window", "softcap")}}
    options["sinks"] = torch.randn(num_heads) if "sinks" in extras else None
    caches: Any = [torch.zeros(2, 4, 8, num_kv_heads, dim, dtype=dtype) for _ in range(2)]
    calls = StepCalls(11, HIDDEN, dtype, *caches[0][:, None], groups=[0])
    prepare_attention(
        calls, 0, qkv, out, (num_heads, num_kv_heads, dim), rotary_dim, norms, **options
    )
    for num_chunk in (5, 9, 2):
        num_tokens = 1 + num_chunk
        batch = PagedBatch(
            query_starts=torch.tensor([0, num_chunk], dtype=torch.int32),
            context_lens=torch.tensor([1, num_chunk], dtype=torch.int32),
            block_tables=torch.tensor([[3, 0, 0], [1, 2, 0]], dtype=torch.int32),
            slot_mapping=torch.tensor([24, *range(8, 8 + num_chunk)]),
            spans=None,
            num_decodes=1,
        )
        x = rows(num_tokens, HIDDEN, dtype)
        cos, sin = (part.contiguous() for part in rows(2 * num_tokens, 32, dtype).chunk(2))
        got = calls(x, {"": (cos, sin)}, [batch])
        sizes = [num_heads * dim, num_kv_heads * dim, num_kv_heads * dim]
        query, key, value = own_qkv(x).split(sizes, -1)
        if norms is not None:
            query, key = (
                rms_norm(part.reshape(num_tokens, -1, len(weight)), weight, 1e-5)
                for part, weight in zip((query, key), weights, strict=True)
            )
        query, key, value = (part.reshape(num_tokens, -1, dim) for part in (query, key, value))
        if rotary_dim:
            rotary(query, key, cos, sin, rotary_dim)
        write_kv(key, value, *caches[1], slot_mapping=batch.slot_mapping)
        attended = paged_attention(query, *caches[1], batch=batch, **options)
        assert torch.equal(caches[0], caches[1])
        assert torch.equal(got, own_out(attended.flatten(1)))


def test_unsupported_sizes(make, dtype):
    def empty(*sizes, dtype=dtype):
        return torch.empty(*sizes, dtype=dtype)

    with pytest.raises(NoKernelError, match="a width of 40"):
        norm(empty(3, 40), empty(40), 1e-5, empty(3, 40))
    half = empty(3, 48, dtype=torch.float16)
    with pytest.raises(NoKernelError, match=r"torch\.float16"):
        norm(half, half[0], 1e-5, half)
    with pytest.raises(NoKernelError, match="a width of 48"):
        norm(empty(3, 48), torch.empty(48, dtype=torch.float64), 1e-5, empty(3, 48))
    with pytest.raises(NoKernelError, match=r"a width of 24 in torch\.float16"):
        gated(*half.chunk(2, 1), activation="silu", out=half[:, :24])
    for depth, num_columns in ((64, 48), (48, 64)):
        with pytest.raises(NoKernelError, match="do not match"):
            make(depth, num_columns)[0](empty(3, 48), out=empty(3, 48))
    for rotary_dim in (16, 96):
        with pytest.raises(NoKernelError, match=f"rotates {rotary_dim} dims"):
            rotation(empty(3, 2, 64), empty(3, 1, 64), rotary_dim)
    keys = empty(4, 8, 2, 64)
    calls = StepCalls(3, HIDDEN, dtype, [keys], [keys], [0])
    for num_heads, num_kv_heads, dim in ((3, 2, 64), (4, 2, 32)):
        heads = empty(3, num_kv_heads, dim)
        with pytest.raises(NoKernelError, match="shapes do not match"):
            calls.attend(0, empty(3, num_heads, dim), heads, heads, scale=1.0)


def test_threads_that_come_late(make, dtype):
    """If there are more threads than cores, some threads do not run while others finish loops.

    The batch has two decodes whose contexts are split, and a chunk with enough rows for several
    blocks of rows.
    """
    chunk, context, block_size = 400, 700, 16
    num_tokens, num_blocks = 2 + chunk, -(-context // block_size)
    batch = PagedBatch(
        query_starts=torch.tensor([0, chunk], dtype=torch.int32),
        context_lens=torch.tensor([context, context, chunk], dtype=torch.int32),
        block_tables=torch.arange(3 * num_blocks, dtype=torch.int32).view(3, num_blocks),
        slot_mapping=torch.tensor(
            [place * num_blocks * block_size + context - 1 for place in range(2)]
            + list(range(2 * num_blocks * block_size, 2 * num_blocks * block_size + chunk))
        ),
        spans=None,
        num_decodes=2,
    )
    x, cosines = rows(num_tokens, HIDDEN, dtype), rows(num_tokens, 32, dtype)
    angles = {"": (cosines, cosines)}
    caches: Any = torch.randn(2, 4, 3 * num_blocks, block_size, 2, 32).to(dtype)
    calls = StepCalls(num_tokens, HIDDEN, dtype, *caches, groups=[0] * 4)
    weight = torch.ones(HIDDEN, dtype=dtype)
    for layer in range(4):
        qkv, out = make(HIDDEN, 256)[0], make(128, HIDDEN)[0]
        prepare_attention(calls, layer, qkv, out, (4, 2, 32), 32, scale=0.2)
        normed, inner = calls.buffer("normed", HIDDEN), calls.buffer("inner", 128)
        calls.add(norm(calls.hidden, weight, 1e-5, normed))
        calls.add(make(HIDDEN, 128)[0](normed, out=inner))
        calls.add(gated(*inner.chunk(2, 1), activation="silu", out=inner[:, :64]))
        down = make(64, HIDDEN)[0]
        calls.add(down(inner[:, :64], out=calls.hidden, residual=calls.hidden))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        expected = calls(x, angles, [batch]).clone()
        assert all(torch.equal(calls(x, angles, [batch]), expected) for _ in range(20))
    finally:
        torch.set_num_threads(num_threads)
    torch.testing.assert_close(calls(x, angles, [batch]), expected)
