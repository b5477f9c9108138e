"""The operations of layers with state in torch, for any device.

`conv_rows` is a short convolution over the tokens of a sequence; its state are the last inputs.
`state_step` and `state_tiles` compute a recurrence whose state is a matrix S for each head, one row
for each unit of a key, one column for each unit of a value:

```
S = e^decay S
u = rate (v - k S)      gated delta rule (arXiv 2412.06464): Qwen3-Next, Qwen3.5
u = rate v              Mamba-2 (arXiv 2405.21060), with B for k, C for q, dt for rate
S = S + k' u
out = q S + skip v
```

`scan` computes Mamba's (arXiv 2312.00752), whose state has a column for each channel, and a decay
for each of its numbers: S = e^(rate scale) S + k' (rate v).

`state_step` goes from token to token. A token has the same bits in any batch, however a prompt is
cut into chunks, and whether it is decoded or read, as long as states are stored in fp32.
`state_tiles` computes up to 64 tokens at once, in fewer operations, with other roundings.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.state.batch import StateBatch

TILE = 64
LENGTH_EPS = 1e-6
"""Added to the squared length of keys and queries of the delta rule."""


def conv_rows(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tails: Tensor,
    batch: StateBatch,
    *,
    silu: bool = False,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Return the causal convolution of each channel over a sequence's tokens, [T, C], dense.

    rows: [T, C], dense in the last dim. weight: [taps, C], the last tap that of the token itself.
    bias: [C]. tails: [slots, taps - 1, C], dense within a slot, in the type of `rows`: the last
    inputs of each sequence, the latest last. They are read and written as `batch` says. silu:
    apply it to the result. before, after: factors of the inputs and of the result, [T, C], dense
    in the last dim.

    Sums are in fp32. As in transformers, inputs, sums and results of silu are rounded to the type
    of `rows`.
    """
    num_kept = len(weight) - 1
    inputs = rows if before is None else rows * before
    old = _read(tails, batch.reads)
    out = rows.new_empty(rows.shape)
    marks = batch.writes.tolist()
    for (start, end), tail in zip(batch.host_spans(), old, strict=True):
        known = torch.cat((tail, inputs[start:end]))
        windows = known.float().unfold(0, num_kept + 1, 1)
        total = windows[..., 0] * weight[0]
        for tap in range(1, num_kept + 1):
            total = total + windows[..., tap] * weight[tap]
        out[start:end] = total if bias is None else total + bias
        for row in range(start, end):
            if marks[row] >= 0:
                tails[marks[row]] = known[row - start + 1 :][:num_kept]
    if silu:
        wide = out.float()
        out = (wide / (1 + torch.exp(-wide))).to(out.dtype)
    return out if after is None else out * after


def state_gates(
    time: Tensor, rates: Tensor | None, scale: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the decay and the rate of `state_step`, [T, heads] each, fp32.

    ```
    steps = softplus(time + offset)
    decay = scale steps
    rate  = sigmoid(rates)      or steps without rates, as in Mamba-2
    ```

    time, rates: [T, heads], dense in the last dim. scale, offset: [heads], fp32. The sigmoid is
    rounded to the type of `rates`.
    """
    steps = F.softplus(time.float() + offset)
    return scale * steps, steps if rates is None else torch.sigmoid(rates).float()


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
    """Return the outputs of the recurrence, [T, heads, dv], dense, in the type of `value`, and
    update the states token by token.

    query, key: [T, key_heads, dk]; value: [T, heads, dv]; all dense in the last dim. Each key head
    belongs to `heads / key_heads` consecutive heads. decay, rate: [T, heads], fp32; decay <= 0 is
    the logarithm of the factor. states: [slots, heads, dk, dv], dense within a slot, with any
    stride between slots, in any floating type. They are read and written as `batch` says. skip:
    [heads], fp32.

    is_delta: compute the delta rule, for which keys and queries are first divided by their lengths,
    and queries by sqrt(dk), too. Otherwise, compute Mamba-2. All of it is computed in fp32.
    """
    query, key = _wide(query, key, value.shape[1], is_delta)
    tokens = (query, key, value.float(), decay.exp(), rate)
    old, out = _read(states, batch.reads).float(), value.new_empty(value.shape)
    for first, end, state in _spans_of_same_length(batch, old):
        for row in range(first, end):
            rows = slice(row, row + len(state))
            step = [part[rows] for part in tokens]
            result, state = _advance(*step, state, is_delta)
            out[rows] = result if skip is None else result + skip[:, None] * step[2]
            _write(states, batch.writes[rows], state)
    return out


def state_tiles(
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
    """Same as `state_step` but for rounding, with up to 64 tokens of a sequence at once."""
    query, key = _wide(query, key, value.shape[1], is_delta)
    tokens = (query, key, value.float(), decay, rate)
    old, out = _read(states, batch.reads).float(), value.new_empty(value.shape)
    marks = batch.writes.tolist()
    for (start, end), state in zip(batch.host_spans(), old, strict=True):
        for first, last in _tiles(marks, start, end):
            tile = [part[first:last].transpose(0, 1) for part in tokens]
            result, state = _advance_tile(*tile, state, is_delta)
            if skip is not None:
                result = result + skip[:, None, None] * tile[2]
            out[first:last] = result.transpose(0, 1)
            _write(states, batch.writes[last - 1 : last], state[None])
    return out


def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    scale: Tensor,
    skip: Tensor,
    states: Tensor,
    batch: StateBatch,
) -> Tensor:
    """Return the outputs of Mamba's recurrence, [T, C], dense, in the type of `value`, and update
    the states token by token.

    query, key: [T, size], C and B. value: [T, C]. All are dense in the last dim. rate: [T, C],
    fp32. scale: [size, C], fp32, negative. skip: [C], fp32. states: [slots, size, C], dense within
    a slot, with any stride between slots, in any floating type. They are read and written as
    `batch` says. All of it is computed in fp32.
    """
    wide, new = value.float(), rate * value
    old, out = _read(states, batch.reads).float(), value.new_empty(value.shape)
    for first, end, state in _spans_of_same_length(batch, old):
        for row in range(first, end):
            rows = slice(row, row + len(state))
            factor = (rate[rows, None] * scale).exp()
            state = factor * state + key[rows, :, None].float() * new[rows, None]
            result = (query[rows, :, None].float() * state).sum(1)
            out[rows] = result + skip * wide[rows]
            _write(states, batch.writes[rows], state)
    return out


def _advance(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    factor: Tensor,
    rate: Tensor,
    state: Tensor,
    is_delta: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, [N, H, dv], and the states, [N, H, dk, dv], after one token of each of N
    sequences.

    Products are summed without matmul, whose order of sums depends on the number of sequences.
    """
    state = state * factor[..., None, None]
    if is_delta:
        value = value - (state * key[..., None]).sum(-2)
    state = state + key[..., None] * (rate[..., None] * value)[..., None, :]
    return (state * query[..., None]).sum(-2), state


def _advance_tile(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    state: Tensor,
    is_delta: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, [H, C, dv], and the state, [H, dk, dv], after C tokens of a sequence."""
    total = decay.cumsum(-1)
    since_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    future = torch.ones(*decay.shape[-1:] * 2, dtype=torch.bool, device=decay.device).triu(1)
    # Masked before `exp`: above the diagonal the exponent is positive and may overflow.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    if is_delta:
        # (I + L) u = rate (v - what the old state knows), with L strictly lower triangular
        value = value - since_start * (key @ state)
        system = key @ key.mT * between * rate[..., None]
        u = torch.linalg.solve_triangular(
            system, rate[..., None] * value, upper=False, unitriangular=True
        )
    else:
        u = rate[..., None] * value
    out = since_start * (query @ state) + (query @ key.mT * between) @ u
    return out, since_start[..., -1:, :] * state + (key * to_end).mT @ u


def _wide(query: Tensor, key: Tensor, num_heads: int, is_delta: bool) -> list[Tensor]:
    """Return queries and keys of all heads, [T, heads, dk], in fp32."""
    both = []
    for rows in (query.float(), key.float()):
        if is_delta:
            rows = rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + LENGTH_EPS)
        both.append(rows.repeat_interleave(num_heads // rows.shape[1], 1))
    if is_delta:
        both[0] = both[0] * query.shape[-1] ** -0.5
    return both


def _read(states: Tensor, reads: Tensor) -> Tensor:
    """Return each sequence's state. Those that are not read, may be NaN."""
    is_new = (reads < 0).view(-1, *[1] * (states.ndim - 1))
    return torch.where(is_new, 0, states[reads.clamp(min=0)])


def _write(states: Tensor, slots: Tensor, state: Tensor) -> None:
    is_kept = slots >= 0
    states[slots[is_kept]] = state[is_kept].to(states.dtype)


def _spans_of_same_length(batch: StateBatch, old: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the first row, the end and the states of the decodes, as one span of one row, and then
    those of each other sequence."""
    if batch.num_decodes:
        yield 0, 1, old[: batch.num_decodes]
    for index in range(batch.num_decodes, len(old)):
        yield *batch.host_spans()[index], old[index : index + 1]


def _tiles(marks: list[int], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Divide rows into tiles that end where a state is written."""
    first = start
    for row in range(start, end):
        if marks[row] >= 0 or row + 1 in (end, first + TILE):
            yield first, row + 1
            first = row + 1
