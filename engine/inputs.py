"""From a plan to the tensors of its forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.plan import Chunk, StepPlan
from kernels.batch import PagedBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One flat row of T tokens, nothing padded."""

    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64."""
    sampled_rows: Tensor
    """[S] int64: which of the T tokens the next ones are sampled after."""
    batch: PagedBatch


def make_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled_rows: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for chunk in plan.chunks:
        start = len(token_ids)
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        slots += _slots(chunk, block_size)
        spans.append((start, len(token_ids), chunk.end))
        if chunk.samples:
            sampled_rows.append(len(token_ids) - 1)

    def tensor(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    batch = PagedBatch(
        query_starts=tensor([0, *(end for _, end, _ in spans)], torch.int32),
        context_lens=tensor([context for _, _, context in spans], torch.int32),
        block_tables=_padded_tables(plan, block_size).to(device),
        slot_mapping=tensor(slots),
        spans=tuple(spans),
    )
    return StepInputs(tensor(token_ids)[None], tensor(positions)[None], tensor(sampled_rows), batch)


def _slots(chunk: Chunk, block_size: int) -> list[int]:
    return [
        chunk.blocks[position // block_size] * block_size + position % block_size
        for position in range(chunk.start, chunk.end)
    ]


def _padded_tables(plan: StepPlan, block_size: int) -> Tensor:
    """[N, B]: of each table what the context uses; a reserved table may be far longer."""
    used = [chunk.blocks[: -(-chunk.end // block_size)] for chunk in plan.chunks]
    width = max(map(len, used))
    return torch.tensor([[*table, *[0] * (width - len(table))] for table in used])
