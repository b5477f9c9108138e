"""The contract of a batching strategy, and the bookkeeping all four share.

```
plan    = strategy.schedule(now)        # which tokens of which sequences, in which KV blocks
result  = executor.submit(plan).wait()  # one forward over all of them, and the sampled tokens
outputs = strategy.commit(plan, result) # append, finish, free
```

The next step may be scheduled and submitted before this one is committed: a device computes in
the order of submission, so what a later step reads is there, and blocks that a commit frees are
written again only by steps after all that were submitted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from core.plan import Chunk, Output, StepPlan, StepResult
from core.sampling import Finish
from core.sequence import Sequence
from strategies.memory.base import KVMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step may hold, in every strategy."""

    max_sequences: int
    """Most sequences that run at once."""
    max_step_tokens: int
    """Token budget of one step; a longer prompt is computed in chunks."""


class Strategy(ABC):
    """Decides what runs next. Not thread-safe: one loop owns it.

    `add`, `abort` and `fail` may be called at any time between two calls of the others, also
    between `schedule` and `commit` of the same step; steps are committed in order. After `abort`
    a sequence is never heard of again; every other one ends with exactly one Output that has
    `finish`.
    """

    def __init__(self, memory: KVMemory, limits: Limits) -> None:
        self.memory = memory
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission, which is order of arrival: oldest first."""

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose `max_length` fits into the memory."""
        assert sequence.max_length <= self.memory.num_tokens, "can never run"
        self.waiting.append(sequence)

    def abort(self, sequence_id: int) -> bool:
        """Drops a sequence and frees its memory; False if it is not here (any more)."""
        for sequence in (*self.running, *self.waiting):
            if sequence.id == sequence_id:
                self._end(sequence, Finish.ABORT)
                return True
        return False

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to compute at this time.

        The plan stays within `limits`. What it computes counts as computed from now on.
        """
        chunks = self._next_chunks(now)
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.end
            chunk.sequence.num_in_flight += chunk.samples
            if chunk.scored:
                chunk.sequence.num_scored_rows = chunk.scored.stop
        return StepPlan(tuple(chunks)) if chunks else None

    @abstractmethod
    def _next_chunks(self, now: float) -> list[Chunk]:
        """What to compute next, each chunk with its blocks taken."""

    def wake_at(self) -> float | None:
        """When to call `schedule` again after it returned None; None: when something arrives."""
        return None

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Appends what was sampled, ends and frees what is done. The same for all strategies."""
        outputs: list[Output] = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.finish is not None:
                continue  # aborted while the step ran
            if chunk.samples or chunk.scored:
                sampled = result[sequence.id]
                count = sequence.append(sampled) if chunk.samples else 0
                outputs.append(
                    Output(
                        sequence.id,
                        sampled.token_ids[:count],
                        sampled.logprobs[:count],
                        sequence.finish,
                        top=sampled.top[:count],
                        prompt=sampled.prompt,
                    )
                )
                if sequence.finish is not None:
                    self._end(sequence, sequence.finish)
        return outputs

    def fail(self, plan: StepPlan) -> list[Output]:
        """Ends every sequence of a plan that could not be run, instead of `commit`."""
        failed = [chunk.sequence for chunk in plan.chunks if chunk.sequence.finish is None]
        for sequence in failed:
            self._end(sequence, Finish.ERROR)
        return [Output(sequence.id, (), (), Finish.ERROR) for sequence in failed]

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        sequence.finish = finish
        self.memory.release(sequence.id)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _chunk(self, sequence: Sequence, length: int) -> Chunk:
        """The next `length` of the sequence's pending tokens."""
        start = sequence.num_computed_tokens
        samples = start + length == sequence.num_tokens
        scored = sequence.rows_to_score(start, start + length)
        return Chunk(sequence, start, length, self.memory.table(sequence.id), samples, scored)


class ReservingStrategy(Strategy):
    """A strategy whose sequences hold their memory from admission to end.

    Nothing of it is ever preempted, so a step is simply the next tokens of all that run.
    """

    def _next_chunks(self, now: float) -> list[Chunk]:
        for sequence in self._admissible(now):
            self.waiting.remove(sequence)
            self.running.append(sequence)
        chunks: list[Chunk] = []
        budget = self.limits.max_step_tokens
        for sequence in self.running:
            length = min(sequence.num_pending_tokens, budget)
            if length > 0:
                chunks.append(self._chunk(sequence, length))
                budget -= length
        return chunks

    @abstractmethod
    def _admissible(self, now: float) -> Iterator[Sequence]:
        """The waiting sequences to admit now, oldest first, each with its memory reserved."""

    def _reserved(self, max_count: int) -> Iterator[Sequence]:
        """The oldest waiting sequences, at most `max_count`, while their reservation fits."""
        for sequence in list(self.waiting)[:max_count]:
            if not self.memory.grow(sequence.id, self._reservation(sequence)):
                return
            yield sequence

    def _reservation(self, sequence: Sequence) -> int:
        """Tokens to reserve for a sequence: all it may ever need."""
        return sequence.max_length
