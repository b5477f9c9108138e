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
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from core.plan import Chunk, Output, StepPlan, StepResult
from core.request import Request
from core.sampling import Failure, Finish
from core.sequence import Sequence
from strategies.beam_group import BeamGroup
from strategies.group import SequenceGroup
from strategies.memory.base import KVMemory, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step may hold, in every strategy."""

    max_sequences: int
    """Most sequences that run at once; a group wider than that runs alone."""
    max_step_tokens: int
    """Token budget of one step; a longer prompt is computed in chunks."""


class StepBudget:
    """The tokens of one step. Sequences that decode come before any chunk of a prompt.

    So a long prompt, however old or urgent, never holds up a running stream by more than a step.
    """

    def __init__(self, num_tokens: int, groups: Iterable[SequenceGroup]) -> None:
        self.num_left = num_tokens
        self._num_owed = sum(group.num_decoding for group in groups)
        """Tokens for sequences that decode and have not had their turn."""

    def turn_of(self, group: SequenceGroup) -> int:
        """Tokens that the group may take; to be asked of each group once, in order."""
        self._num_owed -= group.num_decoding
        return max(self.num_left - self._num_owed, min(self.num_left, group.num_decoding))

    def take(self, num_tokens: int) -> None:
        self.num_left -= num_tokens


class Strategy(ABC):
    """Decides what runs next. Not thread-safe: one loop owns it.

    `add`, `abort` and `fail` may be called at any time between two calls of the others, also
    between `schedule` and `commit` of the same step; steps are committed in order. After `abort`
    a request is never heard of again; of every other one each answer ends with exactly one Output
    that has `finish`, or all of them together with one that has Finish.ERROR.
    """

    def __init__(self, memory: KVMemory, limits: Limits) -> None:
        self.memory = memory
        self.limits = limits
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        """Both by rank, which is priority, then order of arrival: oldest first."""
        self._group_of: dict[int, SequenceGroup] = {}
        """By sequence id."""
        self._swapped_out: list[Sequence] = []
        """Since the last plan."""
        self.num_preemptions = 0
        self.num_swaps = 0
        """Of the preemptions, those whose blocks went to the host."""
        self.num_prompt_tokens = 0
        """Looked for in the prefix cache: of all groups ever admitted, with what they had
        generated before a preemption."""
        self.num_cached_tokens = 0
        """Of those, what prefix caching had kept."""

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return sum(group.num_sequences for group in self.running)

    @property
    def num_filled_tokens(self) -> int:
        """Slots of held blocks that are written; of the others the tables of `running` tell."""
        memory = self.memory
        num_empty = sum(
            len(memory.table(each.id)) * memory.block_size - each.num_computed_tokens
            for group in self.running
            for each in group.sequences
        )
        return max(0, memory.num_held_blocks * memory.block_size - num_empty)

    def add(self, request: Request) -> None:
        """Queues a request that `fits`, and whose `max_length` fits into the memory."""
        assert request.sequences[0].max_length <= self.memory.num_tokens, "can never run"
        for group in self._groups(request):
            self._group_of |= dict.fromkeys(group.sequence_ids, group)
            self._enqueue(group)

    def abort(self, request_id: int, index: int | None = None) -> bool:
        """Drops a request, or one answer of it, and frees its memory; False if it is not here.

        One answer alone can be dropped while answers are told as they come: not of a beam search.
        """
        found = False
        for group in (*self.running, *self.waiting):
            request = group.request
            if request.id != request_id:
                continue
            for sequence in tuple(group.sequences):
                if index is None or (not request.params.beam_width and sequence.index == index):
                    group.end(sequence, Finish.ABORT, self.memory)
                    found = True
            self._drop_if_ended(group)
        return found

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
        moves, swapped_out = self.memory.take_moves(), tuple(self._swapped_out)
        self._swapped_out.clear()
        return StepPlan(tuple(chunks), moves, swapped_out) if chunks or moves else None

    @abstractmethod
    def _next_chunks(self, now: float) -> list[Chunk]:
        """What to compute next, each chunk with its blocks taken."""

    def wake_at(self) -> float | None:
        """When to call `schedule` again after it returned None; None: when something arrives."""
        return None

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Appends what was sampled, ends and frees what is done. The same for all strategies."""
        outputs = self._fail_sequences(result)
        touched: dict[SequenceGroup, None] = {}
        for chunk in plan.chunks:
            if chunk.sequence.finish is not None:
                continue  # failed, or aborted while the step ran
            self.memory.commit(chunk)
            if chunk.samples or chunk.scored:
                touched[self._group_of[chunk.sequence.id]] = None
        for group in touched:
            outputs += group.commit(result, self.memory)
            self._drop_if_ended(group)
        return outputs

    def fail(self, plan: StepPlan, reason: str) -> list[Output]:
        """Ends every request of a plan that could not be run, instead of `commit`."""
        touched = (*(chunk.sequence for chunk in plan.chunks), *plan.swapped_out)
        alive = [sequence for sequence in touched if sequence.finish is None]
        return self._fail_requests({self._group_of[each.id].request.id: reason for each in alive})

    def _fail_sequences(self, result: StepResult) -> list[Output]:
        """Ends the requests of sequences for which no token could be chosen."""
        return self._fail_requests(
            {
                self._group_of[id].request.id: failure.reason
                for id, failure in result.items()
                if isinstance(failure, Failure) and id in self._group_of
            }
        )

    def _fail_requests(self, reasons: Mapping[int, str]) -> list[Output]:
        for request_id in reasons:
            self.abort(request_id)
        return [
            Output(request_id, (), (), Finish.ERROR, failure=reason)
            for request_id, reason in reasons.items()
        ]

    def fits(self, request: Request) -> bool:
        """Whether it can ever run. Samples always can, beams only all together."""
        if not request.params.beam_width:
            return True
        group = BeamGroup(request)
        has_turns = group.num_sequences <= self.limits.max_step_tokens
        return has_turns and self._most_blocks(group) <= self.memory.num_blocks

    @abstractmethod
    def _most_blocks(self, group: SequenceGroup) -> int:
        """The most blocks that a group may ever hold."""

    def _groups(self, request: Request) -> list[SequenceGroup]:
        """What of a request is to run together: beams; nothing else, where nothing is shared."""
        if request.params.beam_width:
            return [BeamGroup(request)]
        return [SequenceGroup(request, [sequence]) for sequence in request.sequences]

    def _enqueue(self, group: SequenceGroup) -> None:
        insort(self.waiting, group, key=lambda each: each.rank)

    def _admit(self, group: SequenceGroup, now: float) -> None:
        if group.request.admitted is None:
            group.request.admitted = now
        self.waiting.remove(group)
        insort(self.running, group, key=lambda each: each.rank)

    def _drop_if_ended(self, group: SequenceGroup) -> None:
        if not group.sequences:
            (self.running if group in self.running else self.waiting).remove(group)
            for sequence_id in group.sequence_ids:
                del self._group_of[sequence_id]

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
        for group in self._admissible(now):
            self._admit(group, now)
        chunks: list[Chunk] = []
        budget = StepBudget(self.limits.max_step_tokens, self.running)
        for group in self.running:
            for sequence, length in group.turns(budget.turn_of(group)):
                chunks.append(self._chunk(sequence, length))
                budget.take(length)
        return chunks

    @abstractmethod
    def _admissible(self, now: float) -> Iterator[SequenceGroup]:
        """The waiting groups to admit now, oldest first, each with its memory reserved."""

    def _reserved(self, max_sequences: int) -> Iterator[SequenceGroup]:
        """The oldest waiting groups, at most so many sequences, while their reservation fits."""
        for group in tuple(self.waiting):
            has_slots = group.num_sequences <= max_sequences or not self.running
            reservation = self._reservation(group.sequences[0])
            spans = [Span(each, 0, reservation) for each in group.sequence_ids]
            if max_sequences <= 0 or not has_slots or not self.memory.reserve(spans):
                return
            yield group
            max_sequences -= group.num_sequences

    def _most_blocks(self, group: SequenceGroup) -> int:
        reservation = self._reservation(group.sequences[0])
        return group.num_sequences * self.memory.blocks_for(reservation)

    def _reservation(self, sequence: Sequence) -> int:
        """Tokens to reserve for a sequence: all it may ever need."""
        return sequence.max_length
