"""Replaces the engine's executor: every sequence gets the tokens that its script has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.replay.script import END, NO_CANDIDATES, Script
from core.beams import Hypotheses, Hypothesis
from core.configuration.options import MOST_DRAFTS
from core.plan import Chunk, StepPlan, StepResult
from core.sampling import ChunkResult, Finish, Sampled, SequenceFailure
from strategies.base import Strategy
from strategies.speculation.drafts import DraftedChunk
from strategies.speculation.speculation import Speculation

FAILURE = "failed in the recording"


class ReplayExecutor:
    """Computes nothing."""

    def __init__(self, script: Script, *, whole_answers: bool, repeats: bool) -> None:
        """whole_answers: a step generates whole answers, as the library executor does.

        repeats: the steps are those of the recording. So each yields as many tokens as it did
        there, and fails if it failed there.
        """
        self._script = script
        self._whole_answers = whole_answers
        self._repeats = repeats
        self.num_steps = 0
        self._plan: StepPlan | None = None

    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> ReplayStep:
        number, self._plan = self.num_steps, plan
        self.num_steps += 1
        between_tokens()
        failed = self._script.failures.get(number) if self._repeats else None
        if failed == "memory":
            raise MemoryError(FAILURE)
        if failed == "submit":
            raise RuntimeError(FAILURE)
        result = {
            chunk.sequence.id: self._answer(number, chunk)
            for chunk in plan.chunks
            if chunk.samples_token or chunk.extra_rows
        }
        return ReplayStep(result, is_lost=failed == "wait")

    def take_plan(self) -> StepPlan | None:
        """Return the plan that was submitted since the last call."""
        plan, self._plan = self._plan, None
        return plan

    def _answer(self, number: int, chunk: Chunk) -> ChunkResult:
        sequence, script = chunk.sequence, self._script
        if self._repeats and (number, sequence.id) in script.not_sampled:
            return SequenceFailure(FAILURE)
        if not chunk.samples_token:
            return Sampled((), ())
        if sequence.params.beam_width:
            if not self._whole_answers:
                return NO_CANDIDATES
            best = Hypothesis((0,), (0.0,), Finish.LENGTH, 0.0)
            return Hypotheses((best,) * sequence.params.n)
        first = chunk.start + 1 if isinstance(chunk, DraftedChunk) else chunk.end
        count = script.counts.get((number, sequence.id), 1) if self._repeats else 1
        tokens = [script.token(sequence.id, first + i) for i in range(count)]
        num_generated = first + count - sequence.num_prompt_tokens
        if (
            script.num_generated.get(sequence.id, 0) <= num_generated
            and sequence.id in script.ended
        ):
            tokens[-1] = END
        return Sampled(tuple(tokens), (0.0,) * count)


class RecordedDrafts(Speculation):
    """Drafts as many tokens as a step of the recording did. Which, does not matter."""

    def __init__(self, strategy: Strategy, script: Script, executor: ReplayExecutor) -> None:
        super().__init__(strategy.memory, strategy.limits, None, MOST_DRAFTS)
        self._script = script
        self._executor = executor

    def drafts(self, chunks: list[Chunk]) -> dict[int, tuple[int, ...]]:
        number, lengths = self._executor.num_steps, self._script.lengths
        return {
            index: (0,) * (lengths[key] - 1)
            for index, chunk in enumerate(chunks)
            if chunk.length == 1
            and chunk.samples_token
            and (key := (number, chunk.sequence.id)) in lengths
        }


@dataclass(frozen=True, slots=True)
class ReplayStep:
    result: StepResult
    is_lost: bool

    def wait(self) -> StepResult:
        if self.is_lost:
            raise RuntimeError(FAILURE)
        return self.result
