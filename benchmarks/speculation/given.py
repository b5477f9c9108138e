"""Answers that are known beforehand, for what a model's own answers cannot show."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.plan import Chunk, StepPlan, StepResult
from core.sampling import Sampled
from core.sequence import Sequence as TokenSequence
from engine.executor import Executor, SubmittedStep
from strategies.speculation.drafts import DraftedChunk
from strategies.speculation.proposer import Proposal, Proposer

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""Token ids, by those of the prompt."""


def answer_to(sequence: TokenSequence, answers: Answers) -> Sequence[int]:
    return answers[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]


class GivenProposer(Proposer):
    """Proposes the tokens of known answers, each right with the same probability."""

    def __init__(self, answers: Answers, acceptance: float, vocab_size: int) -> None:
        self.answers, self.acceptance, self.vocab_size = answers, acceptance, vocab_size
        self.rng = random.Random(0)

    def begin(self, sequence: TokenSequence) -> GivenLookup:
        return GivenLookup(self, sequence)


class GivenLookup:
    def __init__(self, proposer: GivenProposer, sequence: TokenSequence) -> None:
        self._proposer = proposer
        self._tokens, self._start = sequence.token_ids, sequence.num_prompt_tokens
        self._answer = answer_to(sequence, proposer.answers)

    def propose(self, count: int) -> Proposal:
        given, start = self._proposer, len(self._tokens) - self._start
        drafts = [
            token if given.rng.random() < given.acceptance else (token + 1) % given.vocab_size
            for token in self._answer[start : start + count]
        ]
        return Proposal(tuple(drafts), match=16)

    def end(self) -> None: ...


@dataclass(frozen=True)
class GivenExecutor(Executor):
    """Computes steps as another executor does, and returns known answers as their results.

    So drafts from a text are right as often as the text repeats, whatever the model's weights. A
    step takes as long: tokens in flight are still the model's own, and differ from the answers.
    """

    executor: Executor
    answers: Answers

    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> SubmittedStep:
        return _GivenStep(self.executor.submit(plan, between_tokens), plan, self.answers)


@dataclass(frozen=True)
class _GivenStep(SubmittedStep):
    step: SubmittedStep
    plan: StepPlan
    answers: Answers

    def wait(self) -> StepResult:
        computed = self.step.wait()
        chunks = [chunk for chunk in self.plan.chunks if chunk.sequence.id in computed]
        return {chunk.sequence.id: self._result(chunk) for chunk in chunks}

    def _result(self, chunk: Chunk) -> Sampled:
        """Return the answer's tokens up to the first that differs from the draft in its place."""
        drafts = chunk.drafts if isinstance(chunk, DraftedChunk) else ()
        sequence = chunk.sequence
        first = chunk.end - len(drafts) - sequence.num_prompt_tokens
        tokens = answer_to(sequence, self.answers)[first : first + len(drafts) + 1]
        count = 0
        while count < len(drafts) and tokens[count] == drafts[count]:
            count += 1
        return Sampled(tuple(tokens[: count + 1]), (0.0,) * (count + 1))
