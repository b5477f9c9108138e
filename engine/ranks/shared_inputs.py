"""The inputs of a forward pass as one tensor, which rank 0 broadcasts to the other ranks.

Rank 0 alone knows the plan. Tokens that are sampled but not yet read by the host are still in rank
0's device memory. Rank 0 copies them into the inputs there, so they need no messages of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor

from core.configuration.step_size import StepSize
from engine.ranks.order_types import Forward, Repeated
from engine.staging import Slot, aligned
from engine.step.column import Applied, PerTokenColumn, Repeatable, RepeatableColumn
from engine.step.step_inputs import StepInputs, in_groups
from kernels.attention.batch import PagedBatch


def forward_message(inputs: StepInputs, size: StepSize | None) -> Forward:
    """Return the sizes of a step's inputs. size: the size of the CUDA graph to replay, if any."""
    batch = inputs.batch
    num_sequences, num_blocks = batch.block_tables.shape
    return Forward(
        num_tokens=inputs.tokens.shape[1],
        num_groups=len(inputs.batches),
        num_rows=len(inputs.logit_rows),
        num_sequences=num_sequences,
        num_blocks=num_blocks,
        num_starts=len(batch.query_starts),
        num_decodes=batch.num_decodes,
        per_token=tuple(inputs.per_token),
        repeated=tuple(map(_repeated, inputs.repeatable)),
        graph=size,
        spans=batch.spans,
    )


def pack(inputs: StepInputs, sizes: Forward) -> Tensor:
    """Return the inputs as bytes, [B] uint8."""
    batch = inputs.batch
    packed = empty(sizes, inputs.tokens.device)
    tensors = [
        inputs.tokens,
        inputs.logit_rows,
        batch.context_lens,
        batch.query_starts,
        *(batch.block_tables for batch in inputs.batches),
        *inputs.per_token.values(),
        *(tensor for column in inputs.repeatable for tensor in column.tensors),
    ]
    for place, tensor in zip(_places(packed, sizes), tensors, strict=True):
        place.copy_(tensor)
    return packed


def empty(sizes: Forward, device: torch.device) -> Tensor:
    """Return a tensor of the size that `pack` returns."""
    total = sum(aligned(_num_bytes(*part)) for part in _layout(sizes))
    return torch.empty(total, dtype=torch.uint8, device=device)


def unpack(
    packed: Tensor, sizes: Forward, columns: Iterable[PerTokenColumn | RepeatableColumn]
) -> StepInputs:
    """Return the inputs that `pack` has packed, as views, without the chunks to sample for.

    Rank 0 alone samples, and has the original inputs.
    """
    tokens, rows, context_lens, query_starts, *others = _places(packed, sizes)
    block_tables, others = others[: len(tokens) - 2], others[len(tokens) - 2 :]
    batch = PagedBatch(
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables[0],
        slot_mapping=tokens[2],
        spans=sizes.spans,
        num_decodes=sizes.num_decodes,
    )
    used = _used(sizes, {column.name: column for column in columns}, iter(others))
    for column in used:
        batch = column.batched(batch)
    batches = in_groups(batch, tokens, block_tables)
    return StepInputs(tokens, rows, batches, columns=used)


def _used(
    sizes: Forward,
    columns: Mapping[str, PerTokenColumn | RepeatableColumn],
    tensors: Iterator[Tensor],
) -> list[Applied]:
    """Return the columns of a step. tensors: in the order of `pack`."""
    used: list[Applied] = []
    for name in sizes.per_token:
        column = columns[name]
        assert isinstance(column, PerTokenColumn)
        used.append(column.of(Slot(next(tensors))))
    for given in sizes.repeated:
        column = columns[given.name]
        assert isinstance(column, RepeatableColumn)
        used.append(column.repeat([*islice(tensors, len(given.tensors))], given.numbers))
    return used


def _repeated(column: Repeatable) -> Repeated:
    tensors = (
        (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in column.tensors
    )
    return Repeated(column.name, tuple(tensors), column.numbers)


_Layout = list[tuple[tuple[int, ...], torch.dtype]]


def _layout(sizes: Forward) -> _Layout:
    layout: _Layout = [
        ((2 + sizes.num_groups, sizes.num_tokens), torch.int64),
        ((sizes.num_rows,), torch.int64),
        ((sizes.num_sequences,), torch.int32),
        ((sizes.num_starts,), torch.int32),
        *[((sizes.num_sequences, sizes.num_blocks), torch.int32)] * sizes.num_groups,
    ]
    layout += [((sizes.num_tokens,), torch.int64)] * len(sizes.per_token)
    given = (part for column in sizes.repeated for part in column.tensors)
    return layout + [(shape, getattr(torch, dtype)) for dtype, shape in given]


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _places(packed: Tensor, sizes: Forward) -> list[Tensor]:
    """Return the parts of the packed tensor, in the order of `_layout`."""
    places: list[Tensor] = []
    start = 0
    for shape, dtype in _layout(sizes):
        num_bytes = _num_bytes(shape, dtype)
        places.append(packed[start : start + num_bytes].view(dtype).view(shape))
        start += aligned(num_bytes)
    return places
