"""Chunks with drafts: proposed tokens, which a step computes and verifies at once.

A token is sampled after the newest token and after each draft, each with the number of its own
position (`engine.sampling.draw`). So as long as a draft equals the token sampled before it, the
next sampled token is the one that a step without drafts would have sampled, whatever proposed it.
"""

from __future__ import annotations

from msgspec.structs import replace

from core.output import Output
from core.part import Part
from core.plan import NO_STATE, Chunk, StateSlots
from core.sampling import Sampled, SamplingParams
from core.sequence import Sequence
from strategies.group import Grouping


class DraftedChunk(Chunk, frozen=True):
    """The newest token of a sequence, and drafts of the tokens after it."""

    drafts: tuple[int, ...] = ()

    @property
    def ends_in_flight(self) -> bool:
        """Whether the newest token, before the drafts, is still being sampled."""
        return self.start >= len(self.sequence.token_ids)


def drafted(
    chunk: Chunk,
    drafts: tuple[int, ...],
    sequence: Sequence | None = None,
    state: StateSlots = NO_STATE,
) -> DraftedChunk:
    """Return a decode's chunk with drafts, whose slots must be reserved by then.

    state: where the states before the chunk and after each of its tokens are, if there are states.
    """
    return DraftedChunk(
        sequence=sequence or chunk.sequence,
        start=chunk.start,
        length=chunk.length + len(drafts),
        tables=chunk.tables,
        samples_token=True,
        state=state,
        drafts=drafts,
    )


def kept(chunk: DraftedChunk, count: int) -> Chunk:
    """Return the chunk of the newest token and all but the last of the `count` tokens after it."""
    return Chunk(chunk.sequence, chunk.start, count, chunk.tables, samples_token=True)


def some(sampled: Sampled, start: int, end: int) -> Sampled:
    """Return the tokens `start : end` of these."""
    part = slice(start, end)
    return Sampled(sampled.token_ids[part], sampled.logprobs[part], sampled.top_logprobs[part])


def with_tokens(sampled: Sampled, output: Output) -> Output:
    """Return the output of the last of these tokens as that of all."""
    tokens, top_logprobs = sampled.token_ids, sampled.top_logprobs
    return replace(output, token_ids=tokens, logprobs=sampled.logprobs, top_logprobs=top_logprobs)


def is_verifiable(params: SamplingParams, parts: tuple[Part, ...]) -> bool:
    """Whether a token can be sampled before the tokens in front of it are known for certain.

    Penalties, banned words and n-grams look at all of these tokens. `min_tokens` only counts them.
    Sequences that advance together, as one group, cannot have different numbers of tokens.
    """
    return not (
        params.no_repeat_ngram_size
        or params.bad_words
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or any(part.needs_newest or isinstance(part, Grouping) for part in parts)
    )
