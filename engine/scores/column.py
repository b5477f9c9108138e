"""Computes `prompt_logprobs` without holding the logits of a whole prompt at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.plan import Chunk, StepPlan
from core.sampling import ChunkResult, Sampled, SequenceFailure, TopLogprobs
from engine.sampling.kernels import BestTokens, make_sampling_kernels
from engine.sampling.ranking import Ranking, rank
from engine.staging import Slot, Upload
from engine.step.column import Applied, Column
from engine.step.places import Places

MAX_SCORED_ROWS = 256
"""Maximum rows per forward pass whose logits serve only as scores. A large batch samples from about
as many rows."""
NOTHING_SAMPLED = Sampled((), ())


class ScoreColumn(Column):
    """Scores each prompt token by the logits of the token before it."""

    def __init__(self, device: torch.device) -> None:
        # The sampler's own normalizers: a token has the same logprob in a prompt and in an answer.
        self._best_tokens = make_sampling_kernels(device).best_tokens

    def split(self, plan: StepPlan) -> list[StepPlan]:
        return split_plan(plan, MAX_SCORED_ROWS) if self.is_used(plan.chunks) else [plan]

    def is_used(self, chunks: Sequence[Chunk]) -> bool:
        return any(chunk.extra_rows for chunk in chunks)

    def fits_graph(self, chunks: Sequence[Chunk]) -> bool:
        return False  # a graph computes no logits but those to sample from

    def plan(self, places: Places, tokens: NDArray[np.int64], upload: Upload) -> Applied:
        pairs = [
            (start - chunk.start + position, chunk.sequence.token_ids[position + 1])
            for chunk, start in places
            for position in chunk.extra_rows
        ]
        chunks = [chunk for chunk in places.chunks if chunk.extra_rows]
        return _Scores(chunks, upload.put(np.array(pairs, int).T), self._best_tokens)


class _Scores(Applied):
    """The R prompt tokens of a forward pass whose logits are scores."""

    def __init__(self, chunks: Sequence[Chunk], rows: Slot, best_tokens: BestTokens) -> None:
        """rows: [2, R] int64, indices among the step's tokens, and the prompt token after each."""
        self._best_tokens = best_tokens
        self._chunks = chunks
        self._rows = rows
        self._widths = [chunk.sequence.params.prompt_logprobs or 0 for chunk in chunks]
        self._ranking: Ranking | None = None

    @property
    def extra_rows(self) -> Tensor:
        return self._rows.tensor[0]

    def take(self, sampled: Tensor, extra: Tensor) -> None:
        logits = extra.float()
        _, normalizers = self._best_tokens(logits)
        next_tokens = self._rows.tensor[1]
        self._ranking = rank(logits, next_tokens, normalizers, max(self._widths))

    def add_to(self, results: dict[int, ChunkResult]) -> None:
        assert self._ranking is not None, "`take` comes first"
        counts = [len(chunk.extra_rows) for chunk in self._chunks]
        widths = np.repeat(self._widths, counts).tolist()
        scores = self._ranking.wait(widths)
        for chunk, count in zip(self._chunks, counts, strict=True):
            own = tuple(next(scores) for _ in range(count))
            add_scores(results, chunk.sequence.id, own)


def add_scores(
    results: dict[int, ChunkResult], sequence_id: int, scores: tuple[TopLogprobs, ...]
) -> None:
    """Add scores after those that the result of a sequence already has, unless it has failed."""
    sampled = results.get(sequence_id, NOTHING_SAMPLED)
    if not isinstance(sampled, SequenceFailure):
        assert isinstance(sampled, Sampled), "only what is sampled scores its prompt"
        whole = sampled.prompt_logprobs + scores
        results[sequence_id] = replace(sampled, prompt_logprobs=whole)


def split_plan(plan: StepPlan, max_rows: int) -> list[StepPlan]:
    """Split the plan into parts that score at most `max_rows` rows each.

    Tokens that one pass must compute together may need more. The first part gets the block moves.
    """
    parts: list[list[Chunk]] = [[]]
    room = max_rows
    for chunk in plan.chunks:
        rest = chunk
        while len(rest.extra_rows) > room:
            cut = rest.sequence.chunk_end(rest.extra_rows[room]) if room > 0 else rest.start
            if cut <= rest.start and room == max_rows:
                break  # tokens that one pass must compute together need more rows
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
    scored, length = range(chunk.extra_rows.start, position), position - chunk.start
    state = chunk.state
    if state.kept:
        state = state._replace(kept=tuple(pair for pair in state.kept if pair[0] <= length))
    return msgspec.structs.replace(
        chunk, length=length, samples_token=False, extra_rows=scored, state=state
    )


def _from(chunk: Chunk, position: int) -> Chunk:
    scored = range(position, chunk.extra_rows.stop)
    length = position - chunk.start
    kept = tuple((end - length, slot) for end, slot in chunk.state.kept if end > length)
    # It reads what the part before has left.
    state = chunk.state._replace(reads=chunk.state.writes, kept=kept)
    return msgspec.structs.replace(
        chunk, start=position, length=chunk.end - position, extra_rows=scored, state=state
    )
