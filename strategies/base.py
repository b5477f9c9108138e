"""The interface of a batching strategy, and the bookkeeping that all strategies share.

```
plan    = strategy.schedule(now)        # which tokens of which sequences, in which KV blocks
result  = executor.submit(plan).wait()  # one forward pass over all of them, and sampled tokens
outputs = strategy.commit(plan, result) # append, finish, free
```

The next step may be scheduled and submitted before this one is committed. A device computes steps
in the order of submission, so a later step finds the K/V that it reads, and blocks freed by a
commit are only written by steps submitted after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Sequence as Chunks
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, Protocol

from core.output import Output
from core.part import NO_ROWS
from core.plan import Chunk, StepPlan, StepResult
from core.request import Request
from core.sampling import Finish
from core.sequence import Sequence
from strategies.group import SequenceGroup, StepBudget, whole_group
from strategies.memory.base import KVMemory, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one step, for every strategy."""

    max_sequences: int
    """Maximum sequences that run at once. A group with more sequences than that runs alone."""
    max_step_tokens: int
    """Token budget of one step. A longer prompt is computed in chunks."""


Blocked = Literal["slots", "blocks", "batch", "budget"]
"""Why the first waiting group is not admitted: max_sequences run, or a whole batch does; its blocks
are not free; the batch is not full yet (`dynamic`); the tokens of the step are spent."""


class Extension(Protocol):
    """Changes the chunks of a step, whatever strategy has planned it."""

    @property
    def waits(self) -> bool:
        """Whether nothing is to be scheduled before the step in flight is committed."""
        ...

    def extended(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks to compute in their place, with their blocks reserved."""
        ...

    def commit(
        self,
        chunks: Chunks[Chunk],
        result: StepResult,
        commit: Callable[[Chunks[Chunk], StepResult], list[Output]],
    ) -> list[Output]:
        """Commit a group's chunks by calling `commit` for chunks that a strategy may plan."""
        ...


def num_places(memory: KVMemory, groups: Iterable[SequenceGroup]) -> int:
    """Return how many places in the batch groups take, of `max_sequences`."""
    states = memory.states
    return sum(states.num_places(group.num_sequences, group.num_parents) for group in groups)


class Strategy(ABC):
    """Decides what runs next. Not thread-safe: one loop owns it.

    `add` and `abort` may be called between any two other calls, even between `schedule` and
    `commit` of the same step. Steps must be committed in order. Each answer of a request ends with
    exactly one Output that has `finish`, unless it is aborted: then it gets no more outputs.

    engine/failures.py handles failed steps, and exceptions of a strategy itself.
    """

    shares_prompts: ClassVar[bool] = False
    """Whether the samples of a request share the K/V of its prompt, in one group if that fits."""

    def __init__(self, memory: KVMemory, limits: Limits) -> None:
        self.memory = memory
        self.limits = limits
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        """Both lists are sorted by rank: priority, then order of arrival, oldest first."""
        self._group_of: dict[int, SequenceGroup] = {}
        """Maps a sequence id to its group."""
        self.current: SequenceGroup | None = None
        """The group that `schedule` is working on. An exception belongs to its request."""
        self.extension: Extension | None = None
        self.blocked_by: Blocked = "budget"
        """Why the last schedule left the first waiting group waiting, if it did."""
        self._swapped_out: list[Sequence] = []
        """Sequences swapped out since the last plan."""
        self.num_preemptions = 0
        self.num_swaps = 0
        """Preemptions that moved the blocks to the host."""
        self.num_prefix_queries = 0
        """Tokens looked up in the prefix cache when groups were admitted. A preempted group is
        looked up again, with the tokens it had generated."""
        self.num_prefix_hits = 0
        """Tokens found in the prefix cache."""

    @property
    def num_running(self) -> int:
        """Running sequences."""
        return sum(group.num_sequences for group in self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the waiting sequences."""
        return sum(
            group.num_sequences * group.sequences[0].num_prompt_tokens for group in self.waiting
        )

    @property
    def num_filled_tokens(self) -> int:
        """Token slots already written, over all held blocks."""
        memory = self.memory
        num_empty = sum(
            memory.num_empty_slots(sequence.id, sequence.num_computed_tokens)
            for group in self.running
            for sequence in group.sequences
        )
        return max(0, memory.num_held_blocks * memory.block_size - num_empty)

    def add(self, request: Request) -> bool:
        """Queue a request, whose `max_length` must fit into the memory.

        Returns False, and changes nothing, if it can never run. Samples can run one by one, so they
        always fit. An indivisible group must fit as a whole.
        """
        longest = request.sequences[0].max_length
        assert self.memory.blocks_for([longest]) <= self.memory.num_blocks, "it can never run"
        groups = self.split(whole_group(request))
        for group in groups:
            self.enqueue(group)
        return bool(groups)

    def abort(self, request_id: int, index: int | None = None) -> bool:
        """Drop a request, or only its answer `index`, and free its memory.

        Returns False if there is nothing to drop. An indivisible group has no separate answers
        until it ends, so there an `index` drops nothing.
        """
        found = False
        for group in (*self.running, *self.waiting):
            if group.request.id != request_id:
                continue
            for sequence in tuple(group.sequences):
                if index is None or (not group.is_indivisible and sequence.index == index):
                    group.end(sequence, Finish.ABORT, self.memory)
                    found = True
            self._drop_if_ended(group)
        return found

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, now: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute now.

        The plan stays within `limits`. Its tokens count as computed from now on.
        """
        if self.extension is not None and self.extension.waits:
            return self.plan()
        chunks = self._next_chunks(now)
        self.current = None
        if self.extension is not None:
            chunks = self.extension.extended(chunks)
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.end
            chunk.sequence.num_in_flight += chunk.samples_token
            if chunk.extra_rows:
                chunk.sequence.seek(chunk.extra_rows.stop)
        return self.plan(chunks)

    def plan(self, chunks: Iterable[Chunk] = ()) -> StepPlan | None:
        """Return a plan of these chunks, and of the block moves that no plan has had yet."""
        chunks, swapped_out = tuple(chunks), tuple(self._swapped_out)
        moves = self.memory.take_moves()
        self._swapped_out.clear()
        return StepPlan(chunks, moves, swapped_out) if chunks or moves else None

    @abstractmethod
    def _next_chunks(self, now: float) -> list[Chunk]:
        """Return the chunks to compute next, with their blocks already reserved.

        Sets `current` to each group before it works on it.
        """

    def wake_at(self) -> float | None:
        """Return the time at which to call `schedule` again after it returned None.

        None: it need not be called before the next request arrives.
        """
        return None

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Append the sampled tokens, end finished sequences and free their blocks."""
        outputs: list[Output] = []
        self.memory.states.computed(plan.chunks)
        for group, chunks in self.by_group(plan).items():
            outputs += self.commit_group(group, chunks, result)
        return outputs

    def by_group(self, plan: StepPlan) -> dict[SequenceGroup, list[Chunk]]:
        """Return the chunks of each group that has not ended."""
        by_group: dict[SequenceGroup, list[Chunk]] = {}
        for chunk in plan.chunks:
            if group := self._group_of.get(chunk.sequence.id):
                by_group.setdefault(group, []).append(chunk)
        return by_group

    def commit_group(
        self, group: SequenceGroup, chunks: Chunks[Chunk], result: StepResult
    ) -> list[Output]:
        """Commit a group's chunks, except those of sequences that ended while the step ran."""
        if self.extension is not None:
            return self.extension.commit(chunks, result, partial(self._commit_chunks, group))
        return self._commit_chunks(group, chunks, result)

    def _commit_chunks(
        self, group: SequenceGroup, chunks: Iterable[Chunk], result: StepResult
    ) -> list[Output]:
        has_result = False
        for chunk in chunks:
            if chunk.sequence.finish is None:
                self.memory.commit(chunk)
                has_result |= chunk.samples_token or bool(chunk.extra_rows)
        if not has_result:
            return []
        outputs = group.commit(result, self.memory)
        self._drop_if_ended(group)
        return outputs

    def rewind(self, plan: StepPlan) -> None:
        """Make the tokens of a plan pending again, which was not computed, or only in part.

        Call it before the next `schedule`.
        """
        for chunk in plan.chunks:
            sequence = chunk.sequence
            can_resume = self.memory.states.can_compute_twice
            sequence.num_computed_tokens = chunk.start if can_resume else 0
            sequence.num_in_flight -= chunk.samples_token
            if chunk.extra_rows:
                sequence.seek(chunk.extra_rows.start)

    @property
    def request_ids(self) -> set[int]:
        """The ids of all requests that have not ended."""
        return {group.request.id for group in self._group_of.values()}

    def requests_of(self, sequences: Iterable[Sequence]) -> set[int]:
        """Return the ids of the requests of these sequences, except sequences that have ended."""
        return {
            self._group_of[sequence.id].request.id
            for sequence in sequences
            if sequence.finish is None and sequence.id in self._group_of
        }

    def discard(self, request_ids: Container[int]) -> None:
        """Drop requests after an exception that may have left their bookkeeping half done.

        Counts the blocks of the others anew. The prefix cache is empty afterwards.
        """
        groups = dict.fromkeys(self._group_of.values())
        lost = {group for group in groups if group.request.id in request_ids}
        for group in lost:
            for sequence in group.sequences:
                sequence.finish = Finish.ERROR
        self.waiting = [group for group in self.waiting if group not in lost]
        self.running = [group for group in self.running if group not in lost]
        self._group_of = {
            id: group for group in groups if group not in lost for id in group.sequence_ids
        }
        self.current = None
        self.memory.rebuild(self._group_of)

    @abstractmethod
    def _max_blocks(self, group: SequenceGroup) -> int:
        """Return the maximum number of blocks that a group may ever hold."""

    def split(self, whole: SequenceGroup) -> list[SequenceGroup]:
        """Split the sequences of a group: one group if they cannot run alone, else one each.

        Returns none if the sequences cannot run alone, and do not fit together.
        """
        fits = self._max_blocks(whole) <= self.memory.num_blocks
        fits = fits and self.memory.states.can_hold(num_places(self.memory, [whole]))
        if whole.is_indivisible:
            return [whole] if fits and whole.num_sequences <= self.limits.max_step_tokens else []
        if self.shares_prompts and fits:
            return [whole]
        return [SequenceGroup(whole.request, [sequence]) for sequence in whole.sequences]

    def enqueue(self, group: SequenceGroup) -> None:
        """Queue a group that `split` has returned."""
        self._group_of |= dict.fromkeys(group.sequence_ids, group)
        insort(self.waiting, group, key=lambda group: group.rank)

    def _admit(self, group: SequenceGroup, now: float) -> None:
        if group.request.admitted is None:
            group.request.admitted = now
        self.waiting.remove(group)
        insort(self.running, group, key=lambda group: group.rank)

    def _drop_if_ended(self, group: SequenceGroup) -> None:
        if not group.sequences:
            (self.running if group in self.running else self.waiting).remove(group)
            for sequence_id in group.sequence_ids:
                del self._group_of[sequence_id]

    def _chunk(self, sequence: Sequence, length: int) -> Chunk:
        """Return the chunk of the sequence's next `length` pending tokens."""
        start = sequence.num_computed_tokens
        samples = start + length == sequence.num_tokens
        extra_rows = sequence.extra_rows(start, start + length) if sequence.parts else NO_ROWS
        tables = self.memory.tables(sequence.id)
        state = self.memory.states.of(sequence, start + length)
        return Chunk(sequence, start, length, tables, samples, extra_rows, state)


class ReservingStrategy(Strategy):
    """A strategy whose sequences reserve all their memory at admission and keep it to the end.

    Nothing is ever preempted, so a step is the next tokens of all running sequences.
    """

    def _next_chunks(self, now: float) -> list[Chunk]:
        for group in self._admissible(now):
            self._admit(group, now)
        self.current = None
        chunks: list[Chunk] = []
        budget = StepBudget(self.limits.max_step_tokens, self.running)
        for group in self.running:
            self.current = group
            for sequence, length in group.turns(budget.allowance(group)):
                chunks.append(self._chunk(sequence, length))
                budget.take(length)
        return chunks

    @abstractmethod
    def _admissible(self, now: float) -> Iterator[SequenceGroup]:
        """Yield the waiting groups to admit now, oldest first, with their memory reserved."""

    def _reserved(self, max_places: int) -> Iterator[SequenceGroup]:
        """Reserve memory for the oldest waiting groups and yield them, until one does not fit.

        max_places: how many places in the batch they may take, over all groups.
        """
        for group in tuple(self.waiting):
            self.current = group
            num_needed = num_places(self.memory, [group])
            has_slots = num_needed <= max_places or not self.running
            reservation = self._reservation(group.sequences[0])
            spans = [Span(sequence_id, 0, reservation) for sequence_id in group.sequence_ids]
            if max_places <= 0 or not has_slots:
                self.blocked_by = "slots"
                return
            if not self.memory.reserve(spans):
                self.blocked_by = "blocks"
                return
            yield group
            max_places -= num_needed

    def _max_blocks(self, group: SequenceGroup) -> int:
        reservation = self._reservation(group.sequences[0])
        return self.memory.blocks_for([reservation] * group.num_sequences)

    def _reservation(self, sequence: Sequence) -> int:
        """Return the tokens to reserve for a sequence: by default its longest possible length."""
        return sequence.max_length
