"""Prepared layers against the same kernels called one by one, bit for bit where possible."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.attention.batch import PagedBatch
from kernels.cpu.attention import paged_attention
from kernels.cpu.cache import write_kv
from kernels.cpu.calls import Calls
from kernels.cpu.elementwise import gated_activation, rms_norm, rotary
from kernels.cpu.integers import integer_linear, rounds_rows, to_integer_panels
from kernels.cpu.linear import has_pairs, linear
from kernels.cpu.prepared import NoKernelError, PreparedLinear, PreparedMLP, PreparedNorm
from kernels.cpu.prepared_layers import (
    AttentionInputs,
    Heads,
    PreparedAttention,
    PreparedLayer,
    PreparedLayers,
)
from tests.kernels.cpu.panels import to_pairs, to_panels

HIDDEN = 48
SIZES = (1, 7, 50)
OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request):
    if request.param == torch.bfloat16 and not has_pairs():
        pytest.skip("this CPU does not multiply pairs of bf16")
    return request.param


@pytest.fixture
def make(dtype):
    """Return a function that makes a linear layer from its numbers of inputs and outputs.

    It returns the same layer twice: prepared, and as a plain function.
    """
    generator = torch.Generator().manual_seed(3)

    def make(depth, num_columns):
        weight = torch.randn(num_columns, depth, generator=generator) / depth**0.5
        panels = (to_panels if dtype == torch.float32 else to_pairs)(weight.to(dtype))
        bias = torch.randn(num_columns, generator=generator)
        return (
            PreparedLinear.of(panels, num_columns, bias),
            partial(linear, panels=panels, num_columns=num_columns, bias=bias),
        )

    return make


def rows(num_rows, width, dtype):
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(5)).to(dtype)


def run_norm(norm, x, residual=None):
    out = torch.empty_like(x)
    at = None if residual is None else residual.data_ptr()
    norm.bind(x.data_ptr(), len(x), out.data_ptr(), residual=at)
    Calls([norm.kernel])()
    return out


def run_mlp(mlp, x):
    out, scratch = torch.empty_like(x), x.new_empty(len(x), mlp.scratch_width)
    mlp.bind(x.data_ptr(), len(x), out.data_ptr(), scratch.data_ptr())
    Calls(mlp.kernels)()
    return out


def run_attention(attention, x, inputs):
    attended = x.new_empty(len(x), attention.out.depth)
    scratch, out = x.new_empty(len(x), attention.scratch_width), torch.empty_like(x)
    attention.bind(x.data_ptr(), len(x), inputs, attended.data_ptr(), scratch.data_ptr())
    attention.out.bind(attended.data_ptr(), len(x), out.data_ptr())
    Calls([*attention.kernels, attention.out.kernel])()
    return out


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(make, dtype, activation):
    (gate_up, own_gate_up), (down, own_down) = make(HIDDEN, 2 * 64), make(64, HIDDEN)
    prepared = PreparedMLP(gate_up, down, activation)
    assert prepared.dtype == dtype
    for size in SIZES:
        x = rows(size, HIDDEN, dtype)
        expected = own_down(gated_activation(own_gate_up(x), activation))
        assert torch.equal(run_mlp(prepared, x), expected)


@pytest.mark.parametrize("num_columns", [33, 64])
def test_a_residual_is_added_after_rounding(make, dtype, num_columns):
    product, own = make(HIDDEN, num_columns)
    for size in SIZES:
        x, residual = rows(size, HIDDEN, dtype), rows(size, num_columns, dtype)
        out = torch.empty_like(residual)
        run = Calls([product.kernel])
        product.bind(x.data_ptr(), size, out.data_ptr(), residual.data_ptr())
        run()
        assert torch.equal(out, own(x) + residual)
        product.bind(x.data_ptr(), size, out.data_ptr())
        run()
        assert torch.equal(out, own(x))
        product.bind(x.data_ptr(), size, residual.data_ptr(), residual.data_ptr())
        expected = own(x) + residual
        run()
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_weights(dtype, bits):
    codes = torch.randint(2**bits, (40, HIDDEN), dtype=torch.uint8)
    scales, zeros = torch.rand(40, 3), torch.full((40, 3), 7, dtype=torch.uint8)
    panels, bias = to_integer_panels(codes, scales, zeros, bits, 16), torch.randn(40)
    for is_rounded in {False, rounds_rows()}:
        prepared = PreparedLinear.of_integers(panels, bias, dtype, is_rounded=is_rounded)
        assert (prepared.dtype, prepared.depth, prepared.num_columns) == (dtype, HIDDEN, 40)
        for size in SIZES:
            x, out = rows(size, 3 * HIDDEN, dtype), rows(size, 40, dtype)
            expected = integer_linear(x[:, :HIDDEN], panels, bias, is_rounded=is_rounded) + out
            prepared.bind(x.data_ptr(), size, out.data_ptr(), out.data_ptr(), stride=3 * HIDDEN)
            Calls([prepared.kernel])()
            assert torch.equal(out, expected)


def test_strided_rows(make, dtype):
    product, own = make(HIDDEN, 64)
    x, out = rows(7, 3 * HIDDEN, dtype), torch.empty(7, 64, dtype=dtype)
    product.bind(x.data_ptr(), 7, out.data_ptr(), stride=3 * HIDDEN)
    Calls([product.kernel])()
    assert torch.equal(out, own(x[..., :HIDDEN]))


def test_norm(dtype):
    weight = rows(1, HIDDEN, dtype)[0]
    for form in ({}, {"rounds_first": False}, {"offset": 1.0, "rounds_first": False}):
        prepared = PreparedNorm(weight, 1e-5, **form)
        for size in SIZES:
            x = rows(size, HIDDEN, dtype)
            expected = rms_norm(x, weight, 1e-5, **form)
            assert torch.equal(run_norm(prepared, x), expected)
            residual = x.flip(0).contiguous()
            torch.testing.assert_close(run_norm(prepared, x, residual), residual + expected)


@pytest.mark.parametrize(
    "extras",
    [
        {}, {"window": 3}, {"softcap": 2.0}, {"sinks": True},
        {"norms": "head"}, {"norms": "row"}, {"rotary_dim": 0},
    ],
)  # fmt: skip
def test_attention(make, dtype, extras):
    """Two steps, each with a decode and a chunk. Prepared attention and the single kernels have a
    cache each."""
    num_heads, num_kv_heads, dim, rotary_dim = 4, 2, 64, extras.get("rotary_dim", 32)
    width = (num_heads + 2 * num_kv_heads) * dim
    (qkv, own_qkv), (out, own_out) = make(HIDDEN, width), make(num_heads * dim, HIDDEN)
    spread = [4, 2] if extras.get("norms") == "row" else [1, 1]
    weights = [
        rows(1, dim * count, dtype)[0] + shift
        for count, shift in zip(spread, (0.5, 1.5), strict=True)
    ]
    sinks = torch.randn(num_heads) if "sinks" in extras else None
    options = {"scale": 0.2, **{k: v for k, v in extras.items() if k in ("window", "softcap")}}
    norms = tuple(PreparedNorm(weight, 1e-5) for weight in weights) if "norms" in extras else None
    heads = Heads(
        num_heads, num_kv_heads, dim, dim, rotary_dim, sinks=sinks, norms=norms, **options
    )
    assert PreparedAttention.supports(qkv, out, heads)
    prepared = PreparedAttention(qkv, out, heads)
    for num_chunk in (5, 9):
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
        caches = [torch.zeros(2, 4, 8, num_kv_heads, dim, dtype=dtype) for _ in range(2)]
        angles = (cos, sin) if rotary_dim else None
        got = run_attention(prepared, x, AttentionInputs(angles, *caches[0], batch))
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
        write_kv(key, value, *caches[1], batch.slot_mapping)
        attended = paged_attention(query, *caches[1], batch, sinks=sinks, **options)
        assert torch.equal(caches[0], caches[1])
        assert torch.equal(got, own_out(attended.flatten(1)))


@pytest.mark.parametrize(
    "has_norms", [(1, 0, 1, 0), (1, 1, 1, 1), (0, 1, 0, 1)], ids=["before", "around", "after"]
)
def test_layers(make, dtype, has_norms):
    """Three layers of different widths give the same as their parts run one by one. So does the
    first layer alone."""
    places = list(zip((0.5, 0.7, 1.5, 1.7), has_norms, strict=True))

    def make_norm(shift):
        return PreparedNorm(rows(1, HIDDEN, dtype)[0] + shift, 1e-5)

    num_tokens = 5
    batch = PagedBatch(
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.arange(8, 8 + num_tokens),
        spans=None,
    )
    x = rows(num_tokens, HIDDEN, dtype)
    caches, layers, inputs, expected = [], [], [], [x]
    for dim, width in ((32, 64), (64, 32), (32, 256)):
        heads = Heads(2, 1, dim, dim, dim, scale=0.2)
        attention = PreparedAttention(make(HIDDEN, 4 * dim)[0], make(2 * dim, HIDDEN)[0], heads)
        mlp = PreparedMLP(make(HIDDEN, 2 * width)[0], make(width, HIDDEN)[0], "silu")
        norms = [make_norm(shift) if has_norm else None for shift, has_norm in places]
        layers.append(PreparedLayer(tuple(norms), attention, mlp))
        own, ours = (torch.zeros(2, 2, 8, 1, dim, dtype=dtype) for _ in range(2))
        caches.append((own, ours))
        angles = rows(num_tokens, dim, dtype), rows(num_tokens, dim, dtype)
        inputs.append(AttentionInputs(angles, *ours, batch))
        before, after, before_mlp, after_mlp = (
            (lambda x: x) if norm is None else partial(run_norm, norm) for norm in norms
        )
        given = expected[-1]
        attended = run_attention(attention, before(given), AttentionInputs(angles, *own, batch))
        hidden = given + after(attended)
        expected.append(hidden + after_mlp(run_mlp(mlp, before_mlp(hidden))))
    given = x.clone()
    for count in (1, 3):
        run = PreparedLayers(layers[:count])
        for wanted in (None, [], [4], [3, 0, 3], [4, 3, 2, 1, 0]):
            for _, ours in caches:
                ours.zero_()
            kept, ids = expected[count], None
            if wanted is not None:
                ids = torch.tensor(wanted, dtype=torch.int64)
                kept = expected[count][ids]
            got = run(given, inputs[:count], ids)
            if has_norms[1]:  # the norm's product is added to the residual with one rounding
                torch.testing.assert_close(got, kept)
            else:
                assert torch.equal(got, kept)
            assert torch.equal(given, x), "the caller's tensor is unchanged"
            for own, ours in caches[:count]:
                torch.testing.assert_close(own, ours)


def test_layers_of_different_dtypes(make, dtype):
    def layer(norms):
        heads = Heads(2, 1, 32, 32, 32, scale=0.2)
        attention = PreparedAttention(make(HIDDEN, 128)[0], make(64, HIDDEN)[0], heads)
        mlp = PreparedMLP(make(HIDDEN, 64)[0], make(32, HIDDEN)[0], "silu")
        return PreparedLayer((norms[0], None, norms[1], None), attention, mlp)

    fitting, other = (
        PreparedNorm(torch.ones(HIDDEN, dtype=kind), 1e-5) for kind in (dtype, OTHER[dtype])
    )
    with pytest.raises(NoKernelError, match="differ in dtype"):
        layer((fitting, other))
    layers = [layer((fitting, fitting)) for _ in range(2)]
    layers[1].dtype = OTHER[dtype]
    with pytest.raises(NoKernelError, match="differ in dtype"):
        PreparedLayers(layers)


def test_unsupported_layers(make, dtype):
    with pytest.raises(NoKernelError, match="a width of 40"):
        PreparedNorm(torch.ones(40, dtype=dtype), 1e-5)
    with pytest.raises(NoKernelError, match=r"torch\.float16"):
        PreparedNorm(torch.ones(48, dtype=torch.float16), 1e-5)
    with pytest.raises(NoKernelError, match="a width of 24"):
        PreparedMLP(make(48, 48)[0], make(24, 48)[0], "silu")
    with pytest.raises(NoKernelError, match="do not match"):
        PreparedMLP(make(48, 64)[0], make(48, 48)[0], "silu")
    qkv, out = make(48, 4 * 64)[0], make(2 * 64, 48)[0]
    for heads, is_supported in (
        (Heads(2, 1, 64, 64, 64, scale=1.0), True),
        (Heads(4, 2, 32, 32, 32, scale=1.0), True),
        (Heads(1, 1, 64, 128, 64, scale=1.0), True),
        (Heads(2, 1, 64, 64, 16, scale=1.0), False),
        (Heads(2, 1, 64, 64, 96, scale=1.0), False),
        (Heads(3, 1, 64, 64, 64, scale=1.0), False),
        (Heads(4, 4, 32, 32, 32, scale=1.0), False),
    ):
        assert PreparedAttention.supports(qkv, out, heads) is is_supported, heads


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
    x, angles = rows(num_tokens, HIDDEN, dtype), (rows(num_tokens, 32, dtype),) * 2
    layers, inputs = [], []
    for _ in range(4):
        heads = Heads(4, 2, 32, 32, 32, scale=0.2)
        attention = PreparedAttention(make(HIDDEN, 256)[0], make(128, HIDDEN)[0], heads)
        mlp = PreparedMLP(make(HIDDEN, 128)[0], make(64, HIDDEN)[0], "silu")
        norms = [PreparedNorm(torch.ones(HIDDEN, dtype=dtype), 1e-5) for _ in range(2)]
        layers.append(PreparedLayer((norms[0], None, norms[1], None), attention, mlp))
        caches = torch.randn(2, 3 * num_blocks, block_size, 2, 32).to(dtype)
        inputs.append(AttentionInputs(angles, *caches, batch))
    run = PreparedLayers(layers)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        expected = run(x, inputs)
        assert all(torch.equal(run(x, inputs), expected) for _ in range(20))
    finally:
        torch.set_num_threads(num_threads)
    torch.testing.assert_close(run(x, inputs), expected)
