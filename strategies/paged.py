"""Paged batching: continuous batching whose sequences allocate KV blocks on demand.

PagedAttention and the scheduler of vLLM (SOSP 2023, sections 4.3 to 4.5): requests of one priority
are served in order of arrival, and sequences of one prompt share its blocks. A prefix that is still
in the prefix cache is not computed again. When blocks run out, the newest running group is
preempted: it gives back all of its blocks and waits until it is the oldest waiting group and fits
again.
`option.preemption_mode` says what happens to the contents of the blocks:

swap        they move to the host; if the swap space is full, recompute
recompute   they are dropped, and later computed again from the tokens known by then
auto        swap a group that would take more than one step to recompute, or that has several
            sequences: recomputed sequences share only the blocks of the prompt. Recompute all
            other groups
"""

from __future__ import annotations

from core.configuration.strategy_table import PreemptionMode
from core.plan import Chunk, StepPlan
from strategies.base import Limits, Strategy, num_places
from strategies.group import SequenceGroup, StepBudget, Turn
from strategies.memory.base import Span
from strategies.memory.blocks import PagedMemory


class PagedStrategy(Strategy):
    """Schedules running groups, oldest first, then admits waiting ones.

    Waiting groups get the tokens left in the budget of the step, and the free blocks.
    """

    shares_prompts = True

    def __init__(
        self, memory: PagedMemory, limits: Limits, preemption_mode: PreemptionMode = "recompute"
    ) -> None:
        super().__init__(memory, limits)
        self.preemption_mode: PreemptionMode = preemption_mode
        self._blocks = memory
        """The same object as `memory`, typed as PagedMemory."""

    def _max_blocks(self, group: SequenceGroup) -> int:
        lengths = [group.sequences[0].max_length] * group.num_sequences
        return self.memory.blocks_for(lengths, group.num_shared_tokens)

    def _next_chunks(self, now: float) -> list[Chunk]:
        for group in self.running:
            if group.num_sequences > 1:
                self.current = group
                self._share_prompt(group)
        self.current = None
        budget = StepBudget(self.limits.max_step_tokens, self.running)
        return self._continue_running(budget) + self._admit_waiting(budget, now)

    def _continue_running(self, budget: StepBudget) -> list[Chunk]:
        chunks: list[Chunk] = []
        # Preemption takes from the end of `running`, so it never reaches a group already passed.
        index = 0
        while index < len(self.running):
            group = self.current = self.running[index]
            turns = group.turns(budget.allowance(group))
            spans = _spans(turns)
            if self.memory.reserve(spans) or self._make_room(group, spans):
                chunks += self._chunks(turns, budget)
            index += 1
        return chunks

    def _share_prompt(self, group: SequenceGroup) -> None:
        """Fork the other sequences from the first once it has computed the shared tokens."""
        first, *others = group.sequences
        num_shared = group.num_shared_tokens
        for other in others:
            if other.num_computed_tokens < num_shared <= first.num_computed_tokens:
                self._blocks.fork(first.id, other.id, num_shared)
                other.num_computed_tokens = num_shared

    def _make_room(self, group: SequenceGroup, spans: list[Span]) -> bool:
        """Preempt newer groups until the spans of this one can be reserved.

        Returns False if the group itself had to be preempted.
        """
        while True:
            victim = self.current = self.running[-1]
            self._preempt(victim)
            if victim is group:
                return False
            self.current = group
            if self.memory.reserve(spans):
                return True

    def _preempt(self, group: SequenceGroup) -> None:
        if self._should_swap(group) and self._blocks.swap_out(group.sequence_ids):
            self._swapped_out += group.sequences
            self.num_swaps += 1
        else:
            self._release(group)
        self._wait(group)
        self.num_preemptions += 1

    def rewind(self, plan: StepPlan) -> None:
        super().rewind(plan)
        if not self.memory.states.can_compute_twice:
            for group in self.by_group(plan):
                self._release(group)
                self._wait(group)

    def _wait(self, group: SequenceGroup) -> None:
        self.running.remove(group)
        self.enqueue(group)

    def _should_swap(self, group: SequenceGroup) -> bool:
        if self.preemption_mode != "auto":
            return self.preemption_mode == "swap"
        num_computed = sum(sequence.num_computed_tokens for sequence in group.sequences)
        return group.num_sequences > 1 or num_computed > self.limits.max_step_tokens

    def _release(self, group: SequenceGroup) -> None:
        for sequence in group.sequences:
            self.memory.release(sequence.id)
            sequence.num_computed_tokens = 0

    def _admit_waiting(self, budget: StepBudget, now: float) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self.waiting:
            group = self.current = self.waiting[0]
            if not self._has_slots_for(group):
                self.blocked_by = "slots"
                break
            is_swapped = any(map(self._blocks.is_swapped, group.sequence_ids))
            turns = (self._resume if is_swapped else self._begin)(group, budget)
            if not turns:
                break
            self._admit(group, now)
            fits = self.memory.reserve(_spans(turns))
            assert fits, "see `_has_room_for`"
            chunks += self._chunks(turns, budget)
        return chunks

    def _begin(self, group: SequenceGroup, budget: StepBudget) -> list[Turn]:
        """Return the first turns of a group, which start after its cached prefix.

        Returns none, and leaves the group without blocks, if there is no room.
        """
        first, turns = group.sequences[0], []
        forked_at = group.num_shared_tokens if len(group.sequences) > 1 else None
        first.num_computed_tokens = self._blocks.adopt(first, forked_at)
        self.blocked_by = "blocks"
        if self._has_room_for(group):
            self.blocked_by = "budget"
            if group.num_sequences > 1:
                self._share_prompt(group)
            turns = group.turns(budget.num_left)
        if not turns:
            self._release(group)
            return []
        self.num_prefix_queries += first.num_tokens
        self.num_prefix_hits += first.num_computed_tokens
        return turns

    def _resume(self, group: SequenceGroup, budget: StepBudget) -> list[Turn]:
        """Swap a group back in and return its next turns; none if there is no room."""
        turns = group.turns(budget.num_left)
        self.blocked_by = "budget" if not turns else "blocks"
        if not turns or not self._has_room_for(group):
            return []
        self._blocks.swap_in(group.sequence_ids)
        return turns

    def _has_slots_for(self, group: SequenceGroup) -> bool:
        num_needed = num_places(self.memory, (*self.running, group))
        return not self.running or num_needed <= self.limits.max_sequences

    def _has_room_for(self, group: SequenceGroup) -> bool:
        """Whether all tokens of the group fit, plus the next token of each running sequence.

        Without that reserve, the next step would preempt the group that this step admits.
        """
        lengths = [sequence.num_tokens for sequence in group.sequences]
        num_needed = self.memory.blocks_for(lengths, group.num_shared_tokens)
        num_held = len(self.memory.held(group.sequences[0].id))
        num_reserved = self.num_running * self.memory.num_growth_blocks
        return num_needed - num_held + num_reserved <= self.memory.num_free_blocks

    def _chunks(self, turns: list[Turn], budget: StepBudget) -> list[Chunk]:
        budget.take(sum(length for _, length in turns))
        return [self._chunk(sequence, length) for sequence, length in turns]


def _spans(turns: list[Turn]) -> list[Span]:
    return [
        Span(sequence.id, sequence.num_computed_tokens, sequence.num_computed_tokens + length)
        for sequence, length in turns
    ]
