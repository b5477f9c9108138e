"""A request: one prompt, the sequences that answer it, and the outputs for its client."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

import msgspec

from core.output import Output
from core.part import Part
from core.sampling import Sampled, SamplingParams
from core.sequence import Sequence


class Request:
    """The sequences of one prompt: one per sample, or the first beam of a beam search.

    The sequence of sample i has the id `id + i`. The first sample has the request's own seed, so it
    is the same as if it were the only one. Each further sample has a seed derived from the
    request's seed and the sample's index, so samples do not depend on the strategy.
    """

    def __init__(
        self,
        id: int,
        prompt_token_ids: Collection[int],
        params: SamplingParams,
        *,
        arrival: float = 0.0,
        eos_token_ids: Collection[int] = (),
        parts: tuple[Part, ...] = (),
    ) -> None:
        self.id = id
        self.params = params
        self.parts = parts
        self.arrival = arrival
        self.admitted: float | None = None
        """When the request was first scheduled."""
        self.sequences = tuple(
            Sequence(
                id + index,
                prompt_token_ids,
                _params_of_sample(params, index),
                index=index,
                eos_token_ids=eos_token_ids,
                parts=parts if index == 0 else tuple(part.fork() for part in parts),
            )
            for index in range(1 if params.beam_width else params.num_samples)
        )

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """One id for each sample, or for each beam of a beam search."""
        return tuple(range(self.id, self.id + (self.params.beam_width or self.params.num_samples)))

    def output(self, sequence: Sequence, count: int, sampled: Sampled) -> Output:
        """Return the output with the last `count` tokens of `sequence`, the first of `sampled`."""
        return Output(
            self.id,
            tuple(sequence.token_ids[len(sequence.token_ids) - count :]),
            tuple(sequence.logprobs[len(sequence.logprobs) - count :]),
            sequence.finish,
            sequence.index,
            top_logprobs=tuple(sequence.top_logprobs[-count:]) if count else (),
            prompt_logprobs=sampled.prompt_logprobs,
            admitted=self.admitted,
        )


def _params_of_sample(params: SamplingParams, index: int) -> SamplingParams:
    if index == 0 or params.seed is None:
        return params
    digest = blake2b(f"{params.seed}/{index}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(params, seed=int.from_bytes(digest) >> 1)
