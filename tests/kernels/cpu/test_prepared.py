"""Prepared parts against the same kernels called one by one, to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.batch import PagedBatch
from kernels.cpu.attention import paged_attention
from kernels.cpu.cache import write_kv
from kernels.cpu.calls import Calls
from kernels.cpu.elementwise import gated_activation, rms_norm, rotary
from kernels.cpu.linear import has_pairs, linear, to_pairs, to_panels
from kernels.cpu.prepared import (
    AttentionInputs,
    Heads,
    PreparedAttention,
    PreparedLayer,
    PreparedLayers,
    PreparedMLP,
    PreparedNorm,
    PreparedProduct,
    UnpreparedError,
)

HIDDEN = 48
SIZES = (1, 7, 50)
OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request):
    if request.param == torch.bfloat16 and not has_pairs():
        pytest.skip("this CPU has no products of pairs")
    return request.param


@pytest.fixture
def make(dtype):
    """(inputs, outputs) → a product, prepared and as a function."""
    generator = torch.Generator().manual_seed(3)

    def make(depth, num_columns):
        weight = torch.randn(num_columns, depth, generator=generator) / depth**0.5
        panels = (to_panels if dtype == torch.float32 else to_pairs)(weight.to(dtype))
        bias = torch.randn(num_columns, generator=generator)
        return (
            PreparedProduct(panels, num_columns, bias),
            partial(linear, panels=panels, num_columns=num_columns, bias=bias),
        )

    return make


def rows(num_rows, width, dtype):
    return torch.randn(1, num_rows, width, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(make, dtype, activation):
    (gate_up, own_gate_up), (down, own_down) = make(HIDDEN, 2 * 64), make(64, HIDDEN)
    prepared = PreparedMLP(gate_up, down, activation)
    assert prepared.dtype == dtype
    for size in SIZES:
        x = rows(size, HIDDEN, dtype)
        expected = own_down(gated_activation(own_gate_up(x)[0], activation))
        assert torch.equal(prepared(x)[0], expected)


@pytest.mark.parametrize("num_columns", [33, 64])
def test_a_residual_is_added_to_what_is_rounded(make, dtype, num_columns):
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


def test_rows_that_lie_apart(make, dtype):
    product, own = make(HIDDEN, 64)
    x, out = rows(7, 3 * HIDDEN, dtype), torch.empty(1, 7, 64, dtype=dtype)
    product.bind(x.data_ptr(), 7, out.data_ptr(), stride=3 * HIDDEN)
    Calls([product.kernel])()
    assert torch.equal(out, own(x[..., :HIDDEN]))


def test_norm(dtype):
    weight = rows(1, HIDDEN, dtype)[0, 0]
    for form in ({}, {"rounds_first": False}, {"offset": 1.0, "rounds_first": False}):
        prepared = PreparedNorm(weight, 1e-5, **form)
        for size in SIZES:
            x = rows(size, HIDDEN, dtype)
            assert torch.equal(prepared(x)[0], rms_norm(x[0], weight, 1e-5, **form))


@pytest.mark.parametrize(
    "extras", [{}, {"window": 3}, {"softcap": 2.0}, {"sinks": True}, {"norms": True}]
)
def test_attention(make, dtype, extras):
    """A decode and a chunk, twice, in two caches."""
    num_heads, num_kv_heads, dim, rotary_dim = 4, 2, 64, 32
    width = (num_heads + 2 * num_kv_heads) * dim
    (qkv, own_qkv), (out, own_out) = make(HIDDEN, width), make(num_heads * dim, HIDDEN)
    weights = [rows(1, dim, dtype)[0, 0] + each for each in (0.5, 1.5)]
    sinks = torch.randn(num_heads) if "sinks" in extras else None
    options = {"scale": 0.2, **{k: v for k, v in extras.items() if k in ("window", "softcap")}}
    norms = tuple(PreparedNorm(each, 1e-5) for each in weights) if "norms" in extras else None
    heads = Heads(
        num_heads, num_kv_heads, dim, dim, rotary_dim, sinks=sinks, norms=norms, **options
    )
    assert PreparedAttention.computes(qkv, out, heads)
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
        x, (cos, sin) = (
            rows(num_tokens, HIDDEN, dtype),
            rows(2 * num_tokens, rotary_dim, dtype)[0].chunk(2),
        )
        caches = [torch.zeros(2, 4, 8, num_kv_heads, dim, dtype=dtype) for _ in range(2)]
        angles = cos[None].contiguous(), sin[None].contiguous()
        got = prepared(x, AttentionInputs(*angles, *caches[0], batch))
        sizes = [num_heads * dim, num_kv_heads * dim, num_kv_heads * dim]
        query, key, value = (
            each.view(num_tokens, -1, dim) for each in own_qkv(x)[0].split(sizes, -1)
        )
        if norms is not None:
            query, key = (
                rms_norm(each, weight, 1e-5)
                for each, weight in zip((query, key), weights, strict=True)
            )
        rotary(query, key, cos, sin, rotary_dim)
        write_kv(key, value, *caches[1], batch.slot_mapping)
        attended = paged_attention(query, *caches[1], batch, sinks=sinks, **options)
        assert torch.equal(caches[0], caches[1])
        assert torch.equal(got[0], own_out(attended.flatten(1)))


def test_layers(make, dtype):
    """Three, of several widths, against their parts; and the first alone."""
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
        norms = [PreparedNorm(rows(1, HIDDEN, dtype)[0, 0] + each, 1e-5) for each in (0.5, 1.5)]
        layers.append(PreparedLayer((norms[0], norms[1]), attention, mlp))
        own, ours = (torch.zeros(2, 2, 8, 1, dim, dtype=dtype) for _ in range(2))
        caches.append((own, ours))
        angles = [rows(num_tokens, dim, dtype) for _ in range(2)]
        inputs.append(AttentionInputs(*angles, *ours, batch))
        given = expected[-1]
        hidden = given + attention(norms[0](given), AttentionInputs(*angles, *own, batch))
        expected.append(hidden + mlp(norms[1](hidden)))
    given = x.clone()
    for count in (1, 3):
        run = PreparedLayers(layers[:count])
        for wanted in (None, [], [4], [3, 0, 3], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 4]):
            for _, ours in caches:
                ours.zero_()
            kept, ids = expected[count], None
            if wanted is not None:
                kept, ids = torch.zeros_like(x), torch.tensor(wanted, dtype=torch.int64)
                kept[:, wanted] = expected[count][:, wanted]
            assert torch.equal(run(given, inputs[:count], ids), kept)
            assert torch.equal(given, x), "whoever gave it may still need it"
            assert all(torch.equal(own, ours) for own, ours in caches[:count])


def test_layers_of_several_types(make, dtype):
    def layer(norms):
        heads = Heads(2, 1, 32, 32, 32, scale=0.2)
        attention = PreparedAttention(make(HIDDEN, 128)[0], make(64, HIDDEN)[0], heads)
        mlp = PreparedMLP(make(HIDDEN, 64)[0], make(32, HIDDEN)[0], "silu")
        return PreparedLayer(norms, attention, mlp)

    fitting, other = (
        PreparedNorm(torch.ones(HIDDEN, dtype=each), 1e-5) for each in (dtype, OTHER[dtype])
    )
    with pytest.raises(UnpreparedError, match="of several types"):
        layer((fitting, other))
    layers = [layer((fitting, fitting)) for _ in range(2)]
    layers[1].dtype = OTHER[dtype]
    with pytest.raises(UnpreparedError, match="of several types"):
        PreparedLayers(layers)


def test_what_is_not_computed(make, dtype):
    with pytest.raises(UnpreparedError, match="a width of 40"):
        PreparedNorm(torch.ones(40, dtype=dtype), 1e-5)
    with pytest.raises(UnpreparedError, match=r"torch\.float16"):
        PreparedNorm(torch.ones(48, dtype=torch.float16), 1e-5)
    with pytest.raises(UnpreparedError, match="a width of 24"):
        PreparedMLP(make(48, 48)[0], make(24, 48)[0], "silu")
    with pytest.raises(UnpreparedError, match="do not fit together"):
        PreparedMLP(make(48, 64)[0], make(48, 48)[0], "silu")
    qkv, out = make(48, 4 * 64)[0], make(2 * 64, 48)[0]
    for heads, is_computed in (
        (Heads(2, 1, 64, 64, 64, scale=1.0), True),
        (Heads(4, 2, 32, 32, 32, scale=1.0), True),
        (Heads(1, 1, 64, 128, 64, scale=1.0), True),
        (Heads(2, 1, 64, 64, 16, scale=1.0), False),
        (Heads(2, 1, 64, 64, 96, scale=1.0), False),
        (Heads(3, 1, 64, 64, 64, scale=1.0), False),
        (Heads(4, 4, 32, 32, 32, scale=1.0), False),
    ):
        assert PreparedAttention.computes(qkv, out, heads) is is_computed, heads
