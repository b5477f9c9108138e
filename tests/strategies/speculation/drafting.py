"""Drafts with the fake executor: a proposer that knows what will be sampled, but often errs."""

from __future__ import annotations

import dataclasses
import random
from copy import copy

from core.plan import Chunk, StepPlan, StepResult
from core.sampling import Sampled
from core.sequence import Sequence
from strategies.base import Strategy
from strategies.speculation.drafts import DraftedChunk
from strategies.speculation.proposer import Proposal, Proposer
from strategies.speculation.speculation import Speculation
from tests.strategies.fakes import VOCABULARY, FakeExecutor, next_token


class Oracle(Proposer):
    """Proposes the right token with a given probability."""

    def __init__(self, rng: random.Random, acceptance: float) -> None:
        self.rng = rng
        self.acceptance = acceptance

    def begin(self, sequence: Sequence) -> Guesses:
        return Guesses(self, sequence.id, sequence.token_ids)


class Guesses:
    def __init__(self, oracle: Oracle, id: int, tokens: list[int]) -> None:
        self.oracle, self.id, self.tokens = oracle, id, tokens

    def propose(self, count: int) -> Proposal:
        rng, prefix = self.oracle.rng, [*self.tokens]
        for _ in range(rng.randint(0, count)):
            right = next_token(self.id, prefix)
            wrong = (right + 1) % VOCABULARY
            prefix.append(right if rng.random() < self.oracle.acceptance else wrong)
        return Proposal(tuple(prefix[len(self.tokens) :]), match=4)

    def end(self) -> None: ...


class Drafting(FakeExecutor):
    """The fake executor with drafts, whose K and V it writes and reads as those of other tokens."""

    def run(self, plan: StepPlan) -> StepResult:
        newest = dict(self._newest)
        chunks = tuple(_whole(chunk, newest) for chunk in plan.chunks)
        result = dict(super().run(dataclasses.replace(plan, chunks=chunks)))
        for chunk in plan.chunks:
            if isinstance(chunk, DraftedChunk):
                result[chunk.sequence.id] = _verified(chunk, newest)
        return result


def _known(chunk: DraftedChunk, newest: dict[int, int]) -> list[int]:
    tokens = [*chunk.sequence.token_ids]
    return [*tokens, newest[chunk.sequence.id]] if chunk.ends_in_flight else tokens


def _whole(chunk: Chunk, newest: dict[int, int]) -> Chunk:
    """Return the chunk of a sequence whose tokens are the drafts."""
    if not isinstance(chunk, DraftedChunk):
        return chunk
    sequence = copy(chunk.sequence)
    sequence.token_ids = [*_known(chunk, newest), *chunk.drafts]
    return Chunk(
        sequence, chunk.start, chunk.length, chunk.tables, samples_token=True, state=chunk.state
    )


def _verified(chunk: DraftedChunk, newest: dict[int, int]) -> Sampled:
    prefix, kept = _known(chunk, newest), []
    for draft in (*chunk.drafts, None):
        token = next_token(chunk.sequence.id, prefix)
        kept.append(token)
        prefix.append(token)
        if token != draft:
            break
    return Sampled(tuple(kept), (-0.5,) * len(kept))


class Certain(Oracle):
    """Always right, and proposes as much as is wanted."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 1.0)
        self.rng.randint = lambda a, b: b


def speculate(strategy: Strategy, oracle: Oracle, num_draft_tokens: int = 4) -> Speculation:
    """Let a strategy add drafts to its steps."""
    speculation = Speculation(strategy.memory, strategy.limits, oracle, num_draft_tokens)
    strategy.extension = speculation
    return speculation
