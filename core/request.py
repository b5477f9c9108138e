"""A request: one prompt, the sequences that answer it, and what its client hears of them."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b
from itertools import islice

import msgspec

from core.beams import Hypothesis
from core.plan import Output
from core.sampling import SamplingParams, TopLogprobs
from core.sequence import Sequence


class Request:
    """Sequences with one prompt: one for each sample, the i-th with id `id + i`; or the first beam.

    Each sample draws with a seed of its own, made of the request's seed and its index. So the
    first of many is the one that would be alone, and all are the same in every strategy.
    """

    def __init__(
        self,
        id: int,
        prompt_token_ids: Collection[int],
        params: SamplingParams,
        *,
        arrival: float = 0.0,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.id = id
        self.params = params
        self.arrival = arrival
        self.admitted: float | None = None
        """When it was scheduled for the first time."""
        self.sequences = tuple(
            Sequence(
                id + index,
                prompt_token_ids,
                _params_of_sample(params, index),
                index=index,
                eos_token_ids=eos_token_ids,
            )
            for index in range(1 if params.beam_width else params.num_samples)
        )
        self._ended: list[Sequence] = []
        self._prompt_scores: tuple[TopLogprobs, ...] = ()
        """Not told yet."""

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """Of its samples, or of as many beams as it may ever have."""
        return tuple(range(self.id, self.id + (self.params.beam_width or self.params.num_samples)))

    @property
    def streams(self) -> bool:
        """Whether tokens are told as they come, not once the best answers are known."""
        return not self.params.beam_width and self.params.num_samples == self.params.n

    def tell(
        self, sequence: Sequence, count: int, prompt_scores: tuple[TopLogprobs, ...] = ()
    ) -> list[Output]:
        """What the client hears now that the last `count` tokens of `sequence` are new."""
        self._prompt_scores += prompt_scores
        if self.streams:
            return [self._output(sequence, sequence.index, count)]
        if sequence.finish is not None:
            self._ended.append(sequence)
        if len(self._ended) < self.params.num_samples:
            return []
        ranked = sorted(self._ended, key=lambda each: (-sum(each.logprobs), each.index))
        return [
            self._output(each, rank, each.num_generated_tokens)
            for rank, each in enumerate(ranked[: self.params.n])
        ]

    def tell_best(self, hypotheses: Collection[Hypothesis]) -> list[Output]:
        """What the client hears at the end of a beam search."""
        return [
            Output(
                self.id, each.token_ids, each.logprobs, each.finish, rank, admitted=self.admitted
            )
            for rank, each in enumerate(islice(hypotheses, self.params.n))
        ]

    def _output(self, sequence: Sequence, index: int, count: int) -> Output:
        scores, self._prompt_scores = self._prompt_scores, ()
        return Output(
            self.id,
            tuple(sequence.token_ids[len(sequence.token_ids) - count :]),
            tuple(sequence.logprobs[len(sequence.logprobs) - count :]),
            sequence.finish,
            index,
            top=tuple(sequence.top_logprobs[-count:]) if count else (),
            prompt=scores,
            admitted=self.admitted,
        )


def _params_of_sample(params: SamplingParams, index: int) -> SamplingParams:
    if index == 0 or params.seed is None:
        return params
    digest = blake2b(f"{params.seed}/{index}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(params, seed=int.from_bytes(digest) >> 1)
