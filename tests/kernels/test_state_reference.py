"""The torch operations of layers with state against transformers, and their bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from kernels.state import reference
from kernels.state.reference import conv_rows, scan, state_step, state_tiles
from tests.kernels.state_inputs import (
    HEADS,
    MIXED,
    OPERATIONS,
    WRITTEN,
    Chunk,
    check_same_bits,
    make_batch,
    make_pool,
    make_scan,
    make_tokens,
    some_rows,
)

LENGTHS = [1, 5, 64, 130]
FORMS = {"step": state_step, "tiles": state_tiles}
NAN = 1e9
"""Stands for NaN where pools are compared."""


def transformers_delta(tokens, state):
    """Return what transformers computes for one sequence, which is `state_step`'s."""
    rows = [tokens[name][None] for name in ("query", "key", "value", "decay", "rate")]
    options = {
        "initial_state": state[None],
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    one_by_one = len(tokens["query"]) < 10
    name = "recurrent" if one_by_one else "chunk"
    function = getattr(modeling_qwen3_next, f"torch_{name}_gated_delta_rule")
    out, state = function(*rows, **options)
    skip = 0 if tokens["skip"] is None else tokens["skip"][:, None] * tokens["value"]
    return out[0] + skip, state[0]


def transformers_mamba(tokens, state):
    out, state = modeling_mamba2.mamba2_chunk_scan(
        tokens["value"][None],
        tokens["rate"][None],
        # transformers multiplies A by dt
        torch.full((tokens["value"].shape[1],), -0.3),
        tokens["key"][None],
        tokens["query"][None],
        chunk_size=32,
        D=tokens["skip"],
        initial_states=state.mT[None],
        return_final_states=True,
    )
    return out[0], state[0].mT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("heads", HEADS[:2])
def test_recurrences_equal_transformers(heads, is_delta, form):
    tokens = make_tokens(sum(LENGTHS), heads)
    if not is_delta:
        tokens["decay"] = -0.3 * tokens["rate"]
    slots = range(len(LENGTHS))
    chunks = [
        Chunk(length, slot, {length: slot}) for slot, length in zip(slots, LENGTHS, strict=True)
    ]
    chunks[2] = Chunk(LENGTHS[2], -1, {LENGTHS[2]: 2})
    pool = make_pool((heads[1], *heads[2:]), known=slots)
    before, batch = pool.clone(), make_batch(chunks)
    before[2] = 0
    out = FORMS[form](**tokens, states=pool, batch=batch, is_delta=is_delta)
    function = transformers_delta if is_delta else transformers_mamba
    for slot, (start, end) in zip(slots, batch.host_spans(), strict=True):
        expected, state = function(some_rows(tokens, slice(start, end)), before[slot])
        torch.testing.assert_close(out[start:end], expected, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(pool[slot], state, rtol=1e-4, atol=2e-5)


def test_scans_equal_transformers():
    """It scans prompts from a state of zeros, and updates the state of one token."""
    tokens, slots = make_scan(61 + 2, 12, 40), (3, 0, 1)
    pool = make_pool((12, 40), known=slots)
    before = pool.clone()
    out = scan(
        **tokens,
        states=pool,
        batch=make_batch([Chunk(1, 0, {1: 0}), Chunk(1, 1, {1: 1}), Chunk(61, -1, {61: 3})]),
    )
    for slot, part in ((0, slice(0, 1)), (1, slice(1, 2)), (3, slice(2, 63))):
        rows = some_rows(tokens, part)
        value, rate, key, query = (rows[name].T[None] for name in ("value", "rate", "key", "query"))
        scale, skip = rows["scale"].T, rows["skip"]
        if slot == 3:
            expected, state = modeling_mamba.mamba_selective_scan(
                value, rate, scale, key, query, skip, return_last_state=True
            )
        else:
            state = before[slot].T[None].clone()
            decode = (part[..., 0] for part in (value, rate))
            expected = modeling_mamba.mamba_selective_state_update(
                state, *decode, scale, key[..., 0], query[..., 0], skip
            )[..., None]
        torch.testing.assert_close(out[part], expected[0].T, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(pool[slot], state[0].T, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("taps", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_equal_transformers(taps, dtype):
    rows, weight, bias = (torch.randn(*size).to(dtype) for size in ((70, 48), (taps, 48), (48,)))
    pool = torch.full((3, taps - 1, 48), torch.nan, dtype=dtype)
    chunks = [Chunk(50, -1, {50: 1}), Chunk(20, -1, {2: 0, 20: 2})]
    out = conv_rows(rows, weight, bias, pool, make_batch(chunks), silu=True)
    for slot, part in ((1, slice(0, 50)), (2, slice(50, 70))):
        expected = modeling_mamba2.causal_conv1d_fn(
            rows[part].T[None], weight.T.contiguous(), bias, activation="silu"
        )
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[part], expected[0].T, rtol=tolerance, atol=tolerance)
        assert torch.equal(pool[slot], rows[part][1 - taps :])
    known = torch.cat([torch.zeros(taps, 48, dtype=dtype), rows[50:52]])
    assert torch.equal(pool[0], known[1 - taps :])


def test_gates_of_a_convolution():
    rows, before, after, weight = torch.randn(4, 6, 48)
    weight, pool = weight[:3], make_pool((2, 48))
    batch = make_batch([Chunk(6, 2, {6: 1})])
    out = conv_rows(rows, weight, None, pool, batch, before=before, after=after)
    other = make_pool((2, 48))
    expected = after * conv_rows(rows * before, weight, None, other, batch)
    assert torch.equal(out, expected)
    assert torch.equal(pool.nan_to_num(NAN), other.nan_to_num(NAN))
    past = torch.cat([make_pool((2, 48))[2], rows * before])
    torch.testing.assert_close(
        out, after * F.conv1d(past.T[None], weight.T[:, None], groups=48)[0].T
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_delta", [True, False])
def test_only_the_named_slots_are_read_and_written(is_delta, form):
    heads = HEADS[0]
    batch, shape = make_batch(MIXED), (heads[1], *heads[2:])
    tokens, pool, before = make_tokens(len(batch.writes), heads), make_pool(shape), make_pool(shape)
    out = FORMS[form](**tokens, states=pool, batch=batch, is_delta=is_delta)
    assert out.isfinite().all()
    assert pool[WRITTEN].isfinite().all()
    others = [slot for slot in range(len(pool)) if slot not in WRITTEN]
    assert torch.equal(pool[others].nan_to_num(NAN), before[others].nan_to_num(NAN))


def test_a_scan_reads_and_writes_only_the_named_slots():
    batch, shape = make_batch(MIXED), (16, 48)
    pool, before = make_pool(shape), make_pool(shape)
    out = scan(**make_scan(len(batch.writes), *shape), states=pool, batch=batch)
    assert out.isfinite().all()
    assert pool[WRITTEN].isfinite().all()
    others = [slot for slot in range(len(pool)) if slot not in WRITTEN]
    assert torch.equal(pool[others].nan_to_num(NAN), before[others].nan_to_num(NAN))


def test_tiles_equal_steps():
    for heads in HEADS:
        batch, shape = make_batch(MIXED), (heads[1], *heads[2:])
        tokens = make_tokens(len(batch.writes), heads)
        for is_delta in (True, False):
            pools = [make_pool(shape) for _ in FORMS]
            outs = [
                form(**tokens, states=pool, batch=batch, is_delta=is_delta)
                for form, pool in zip(FORMS.values(), pools, strict=True)
            ]
            torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
            states = [pool.nan_to_num(NAN) for pool in pools]
            torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_token_has_the_same_bits_in_any_chunk_and_batch(operation):
    check_same_bits(operation, reference, (2, 4, 32, 40))


def test_states_may_be_stored_in_bf16():
    heads = HEADS[0]
    batch, shape = make_batch(MIXED), (heads[1], *heads[2:])
    tokens = make_tokens(len(batch.writes), heads)
    for form in FORMS.values():
        narrow, wide = make_pool(shape, torch.bfloat16), make_pool(shape)
        wide.copy_(narrow)
        outs = [form(**tokens, states=pool, batch=batch, is_delta=True) for pool in (narrow, wide)]
        assert torch.equal(*outs)
        rounded = wide[WRITTEN].bfloat16()
        assert torch.equal(narrow[WRITTEN], rounded)
