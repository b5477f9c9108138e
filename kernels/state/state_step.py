"""The recurrence token by token: for decodes, and for prompts whose bits no cut may change."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import stride
from kernels.launch_plan import LaunchPlan, planned
from kernels.state.batch import StateBatch
from kernels.state.reference import LENGTH_EPS
from kernels.state.rows import check_recurrence

COLUMNS = 32
"""Columns of a state in a program; with 128 rows, 64 take 203 registers of a thread."""


@triton.jit
def state_step_kernel(
    out, query, key, value, decay, rate, skip, states, starts, reads, writes,
    num_heads, query_stride, key_stride, value_stride, slot_stride, length_eps,
    IS_DELTA: tl.constexpr, SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Program (i, h, c) computes the c-th columns of the state of head h of sequence i."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    read = tl.load(reads + sequence)
    dims = tl.arange(0, KEY_DIM)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    cells = head * (KEY_DIM * VALUE_DIM) + dims[:, None] * VALUE_DIM + columns[None, :]
    # Masked: a slot that is not read may hold NaN.
    state = tl.load(states + read * slot_stride + cells, mask=read >= 0, other=0).to(tl.float32)
    start = tl.load(starts + sequence)
    for offset in range(0, tl.load(starts + sequence + 1) - start):
        token = start.to(tl.int64) + offset
        shared = head // SHARE * KEY_DIM + dims
        keys = tl.load(key + token * key_stride + shared).to(tl.float32)
        queries = tl.load(query + token * query_stride + shared).to(tl.float32)
        u = tl.load(value + token * value_stride + head * VALUE_DIM + columns).to(tl.float32)
        added = u
        gate = token * num_heads + head
        state *= tl.exp(tl.load(decay + gate))
        if IS_DELTA:
            keys *= tl.rsqrt(tl.sum(keys * keys, 0) + length_eps)
            queries *= tl.rsqrt(tl.sum(queries * queries, 0) + length_eps) * KEY_DIM**-0.5
            u -= tl.sum(keys[:, None] * state, 0)
        state += keys[:, None] * (tl.load(rate + gate) * u)[None, :]
        result = tl.sum(queries[:, None] * state, 0)
        if skip is not None:
            result += tl.load(skip + head) * added
        places = out + gate * VALUE_DIM + columns
        tl.store(places, result.to(out.dtype.element_ty))
        write = tl.load(writes + token)
        if write >= 0:
            tl.store(states + write * slot_stride + cells, state.to(states.dtype.element_ty))


def state_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    batch: StateBatch,
    *,
    is_delta: bool,
    skip: Tensor | None = None,
) -> Tensor:
    """Same as `kernels.state.reference.state_step`. Raises ValueError for other shapes, strides and
    types than those of `kernels.state.rows`."""
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    run_steps(query, key, value, decay, rate, states, batch, out, is_delta=is_delta, skip=skip)
    return out


def run_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    batch: StateBatch,
    out: Tensor,
    *,
    is_delta: bool,
    skip: Tensor | None = None,
    num_sequences: int | None = None,
) -> None:
    """Write the results of the first `num_sequences` sequences, or of all, to `out`.

    out: [T, heads, dv], contiguous.
    """
    check_recurrence(query, key, value, decay, rate, states)
    count = len(batch.reads) if num_sequences is None else num_sequences
    plan = _plan(query, key, value, states, count)
    if count:
        state_step_kernel[plan.grid](
            out, query, key, value, decay, rate, skip, states,
            batch.starts, batch.reads, batch.writes,
            *plan.scalars, LENGTH_EPS, IS_DELTA=is_delta, **plan.options,
        )


@planned
def _plan(query: Tensor, key: Tensor, value: Tensor, states: Tensor, count: int) -> LaunchPlan:
    (_, num_heads, value_dim), key_dim = value.shape, query.shape[2]
    columns = min(COLUMNS, value_dim)
    return LaunchPlan(
        (count, num_heads, value_dim // columns),
        (num_heads, *(stride(rows, 0) for rows in (query, key, value)), states.stride(0)),
        {
            "SHARE": num_heads // query.shape[1],
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "COLUMNS": columns,
        },
    )
