"""Computes `prompt_logprobs` without holding the logits of a whole prompt at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from torch import Tensor

from core.plan import Chunk, StepPlan
from core.sampling import TopLogprobs
from engine.sampling.ranking import rank
from engine.step_inputs import ScoredRows

MAX_SCORED_ROWS = 256
"""Maximum rows per forward pass whose logits serve only as scores. A large batch samples from about
as many rows."""


def split_plan(plan: StepPlan, max_rows: int) -> list[StepPlan]:
    """Split the plan into parts that score at most `max_rows` rows each.

    An image that one pass must compute whole may need more. The first part gets the block moves.
    """
    parts: list[list[Chunk]] = [[]]
    room = max_rows
    for chunk in plan.chunks:
        rest = chunk
        while len(rest.extra_rows) > room:
            cut = rest.sequence.chunk_end(rest.extra_rows[room]) if room > 0 else rest.start
            if cut <= rest.start and room == max_rows:
                break  # an image that one pass must compute whole needs more rows
            if cut > rest.start:
                parts[-1].append(_until(rest, cut))
                rest = _from(rest, cut)
            parts.append([])
            room = max_rows
        parts[-1].append(rest)
        room -= len(rest.extra_rows)
    first, *others = (tuple(chunks) for chunks in parts)
    return [replace(plan, chunks=first), *map(StepPlan, others)]


def _until(chunk: Chunk, position: int) -> Chunk:
    scored = range(chunk.extra_rows.start, position)
    return msgspec.structs.replace(
        chunk, length=position - chunk.start, samples_token=False, extra_rows=scored
    )


def _from(chunk: Chunk, position: int) -> Chunk:
    scored = range(position, chunk.extra_rows.stop)
    return msgspec.structs.replace(
        chunk, start=position, length=chunk.end - position, extra_rows=scored
    )


class PromptScores:
    """The scores of one forward pass, on their way to the host."""

    def __init__(self, logits: Tensor, scored_rows: ScoredRows) -> None:
        """logits: [R, vocabulary], of the scored rows."""
        self._chunks = scored_rows.chunks
        width = max(_width(chunk) for chunk in self._chunks)
        logits = logits.float()
        normalizers = logits.logsumexp(-1)
        self._ranking = rank(logits, scored_rows.next_tokens, normalizers, width).to_host()

    def wait(self) -> dict[int, tuple[TopLogprobs, ...]]:
        """Return the scores of each sequence's tokens, by sequence id."""
        widths = [_width(chunk) for chunk in self._chunks for _ in chunk.extra_rows]
        scores = self._ranking.wait(widths)
        return {
            chunk.sequence.id: tuple(next(scores) for _ in chunk.extra_rows)
            for chunk in self._chunks
        }


def _width(chunk: Chunk) -> int:
    return chunk.sequence.params.prompt_logprobs or 0


def join_scores(
    parts: Sequence[dict[int, tuple[TopLogprobs, ...]]],
) -> dict[int, tuple[TopLogprobs, ...]]:
    """Concatenate the scores of each sequence over the forward passes of a step."""
    whole: dict[int, tuple[TopLogprobs, ...]] = {}
    for part in parts:
        for id, scores in part.items():
            whole[id] = whole.get(id, ()) + scores
    return whole
