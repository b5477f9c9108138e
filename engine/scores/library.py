"""Scores the prompts that transformers' `generate` answers, which computes no logits for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from core.plan import Chunk
from core.sampling import ChunkResult, TopLogprobs
from engine.sampling.ranking import rank
from engine.scores.column import MAX_SCORED_ROWS, add_scores

NOT_FOR_ENCODER_DECODERS = {"prompt_logprobs": "not available for an encoder-decoder model"}


def score_prompts(model: Any, chunks: Sequence[Chunk], results: dict[int, ChunkResult]) -> None:
    """Add the scores to the results of the chunks that want them. Takes extra forward passes."""
    for chunk in chunks:
        if chunk.extra_rows:
            add_scores(results, chunk.sequence.id, tuple(_scores(model, chunk)))


def _scores(model: Any, chunk: Chunk) -> Iterator[TopLogprobs]:
    """Yield, for each position in `extra_rows`, the score of the prompt token that follows it.

    If the model supports `logits_to_keep`, each pass computes the logits of at most MAX_SCORED_ROWS
    positions, which bounds memory.
    """
    scored = chunk.extra_rows
    ids = torch.tensor([chunk.sequence.token_ids[: chunk.end]], device=model.device)
    can_keep_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
    at_once = MAX_SCORED_ROWS if can_keep_rows else max(1, len(scored))
    width = chunk.sequence.params.prompt_logprobs or 0
    for start in range(scored.start, scored.stop, at_once):
        rows = torch.tensor(scored[start - scored.start :][:at_once], device=ids.device)
        keywords = {"logits_to_keep": rows} if can_keep_rows else {}
        logits = model(input_ids=ids, use_cache=False, **keywords).logits[0]
        logits = (logits if can_keep_rows else logits[rows]).float()
        ranking = rank(logits, ids[0, rows + 1], logits.logsumexp(-1), width)
        yield from ranking.wait([width] * len(rows))
