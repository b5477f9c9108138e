"""The logprobs of a prompt's tokens, for responses."""

from __future__ import annotations

from collections.abc import Iterator

from container.apis.generation.generation import Generation
from container.apis.generation.reply import Record
from container.http.off_loop import in_thread_if_long
from core.sampling import TopLogprobs
from core.text.tokenizer import Tokenizer


def prompt_logprobs(generation: Generation, tokenizer: Tokenizer) -> list[Record | None]:
    """Return vLLM's `prompt_logprobs`: None for the first token, then a record per token.

    The keys of a record are token ids: that of the token, and those of the most likely tokens.
    """
    token_ids, scores = generation.prompt_token_ids, generation.received.prompt_logprobs

    def record(token_id: int, score: TopLogprobs) -> Record:
        ranked = [(token_id, score.logprob, score.rank)]
        likely = zip(score.token_ids, score.logprobs, strict=True)
        ranked += [(*pair, rank) for rank, pair in enumerate(likely, 1)]
        return {
            str(id): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.piece(id)}
            for id, logprob, rank in ranked
        }

    def records() -> list[Record | None]:
        pairs = zip(token_ids[1:], scores, strict=True)
        return [None, *(record(token_id, score) for token_id, score in pairs)]

    num_logprobs = sum(1 + len(score.token_ids) for score in scores)
    return in_thread_if_long(records, size=num_logprobs)


def scored_prompt(generation: Generation) -> Iterator[tuple[int, TopLogprobs | None]]:
    """Yield the prompt's tokens. The first has no score, since no token precedes it."""
    scores = (None, *generation.received.prompt_logprobs)
    return zip(generation.prompt_token_ids, scores, strict=True)
