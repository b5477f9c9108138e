"""Slots for the states of sequences, beside the blocks of their K and V.

A state has one size, however long its sequence is. So a sequence takes a slot when it is admitted
and keeps it until it ends: states never run out while it runs.

Sequences that fork share a slot until their next chunk, which reads it and writes one of their own.

```
step k      parent writes 3
            children fork: 3 is shared by three
step k+1    parent reads 3, writes 5     child reads 3, writes 1     child reads 3, writes 8
            3 is free once the step is planned
```

A chunk whose last tokens may be taken back leaves the state after each of them in a slot. These are
spare slots, which no sequence ever needs to run.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from typing import TYPE_CHECKING, Any

from core.plan import BlockMoves, BlockPairs, StateSlots
from core.sequence import Sequence
from strategies.memory.base import KVMemory, Span, States
from strategies.memory.checkpoints import Checkpoints
from strategies.memory.pool import BlockPool
from strategies.memory.slots import SlotMemory

if TYPE_CHECKING:
    from core.configuration.kv_layout import KVLayout


class Slots:
    """Slots `0 : count`, and which sequence holds which. Sequences may share one.

    A slot may also hold the state of a cached prefix. It is free unless a sequence holds it, too.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: dict[int, int] = {}
        """By sequence id."""
        self.pool = BlockPool(count)
        self.checkpoints = Checkpoints()

    def allocate(self) -> int:
        """Take a free slot. The caller has checked that there is one."""
        [slot] = self.pool.allocate(1)
        self.evict(slot)
        return slot

    def evict(self, slot: int) -> None:
        """Remove the checkpoint that a slot has, if any, before the slot is overwritten."""
        self.checkpoints.forget(slot)

    def free(self, slot: int) -> None:
        """Remove a reference from a slot."""
        self.pool.release((slot,), cached=self.checkpoints)

    def take(self, sequence_ids: Iterable[int]) -> None:
        """Give each of these sequences a slot. The caller has checked that there are enough."""
        self.held.update((id, self.allocate()) for id in sequence_ids)

    def share(self, parent_id: int, child_id: int) -> None:
        """Give a child its parent's slot in place of its own. It is no error if there is none."""
        self.release(child_id)
        if parent_id in self.held:
            self.held[child_id] = self.held[parent_id]
            self.pool.share((self.held[child_id],))

    def release(self, sequence_id: int) -> None:
        """Free a sequence's slot. It is no error if it holds none."""
        if sequence_id in self.held:
            self.free(self.held.pop(sequence_id))

    def move(self, sequence_ids: Iterable[int], target: Slots) -> BlockPairs:
        """Let these sequences hold slots of `target` instead. Return the pairs of slots."""
        pairs: dict[int, int] = {}
        for id in sequence_ids:
            slot = self.held[id]
            if slot in pairs:
                target.pool.share((pairs[slot],))
            else:
                pairs[slot] = target.allocate()
            target.held[id] = pairs[slot]
            self.release(id)
        return tuple(pairs.items())

    def keep(self, sequence_ids: Container[int], left: Collection[int] = ()) -> None:
        """Keep only the slots of these sequences, and count anew. left: slots held besides.

        There are no checkpoints then.
        """
        self.checkpoints = Checkpoints()
        self.held = {id: slot for id, slot in self.held.items() if id in sequence_ids}
        self.pool = BlockPool(self.count, ((slot,) for slot in (*self.held.values(), *left)))

    def check_integrity(self, left: Iterable[int] = ()) -> None:
        """Raise AssertionError if a slot is lost. left: slots that are held besides."""
        slots = [(slot,) for slot in (*self.held.values(), *left)]
        self.pool.check_integrity(slots, cached=self.checkpoints)


class RunningStates(States):
    """The slots of running sequences."""

    can_compute_twice = False

    def __init__(self, slots: Slots, num_spare: int = 0) -> None:
        """num_spare: how many of the slots are for `with_ahead`."""
        self.slots = slots
        self._num_spare = num_spare
        self._ahead: dict[int, tuple[int, ...]] = {}
        """Spare slots by sequence id."""
        self._left: dict[int, int] = {}
        """By sequence id: shared slots that the step that is being planned leaves. It still reads
        them, so nobody may write them."""

    @property
    def num_slots(self) -> int:
        return self.slots.count

    @property
    def kept_slots(self) -> Collection[int]:
        return self.slots.pool.kept

    def held(self, sequence_id: int) -> Collection[int]:
        if sequence_id not in self.slots.held:
            return ()
        return self.slots.held[sequence_id], *self._ahead.get(sequence_id, ())

    def of(self, sequence: Sequence, end: int) -> StateSlots:
        slot = self.slots.held[sequence.id]
        if self.slots.pool.num_references(slot) == 1:
            return StateSlots(slot, slot)
        return self._leave(sequence.id, slot)

    def _leave(self, sequence_id: int, slot: int) -> StateSlots:
        """Let a sequence read its slot, and write another one, which it holds from now on."""
        own = self.slots.allocate()
        self.slots.held[sequence_id] = own
        self._left[sequence_id] = slot
        return StateSlots(slot, own)

    def num_places(self, num_sequences: int, num_parents: int) -> int:
        """One more for each slot that is shared: all who share it leave it before it is free."""
        return num_sequences + num_parents

    def can_hold(self, num_places: int) -> bool:
        return num_places <= self.slots.count - self._num_spare

    @property
    def num_ahead(self) -> int:
        return self._num_spare - len(self._slots_ahead)

    @property
    def _slots_ahead(self) -> list[int]:
        return [slot for slots in self._ahead.values() for slot in slots]

    def has_ahead(self, sequence_id: int) -> bool:
        """Whether it is not known yet which of its slots has the sequence's state."""
        return sequence_id in self._ahead

    def with_ahead(self, sequence_id: int, state: StateSlots, count: int) -> StateSlots:
        self.settle(sequence_id, 0)  # of a step that was lost
        self._ahead[sequence_id] = tuple(self.slots.allocate() for _ in range(count))
        return StateSlots(state.reads, state.writes, self._ahead[sequence_id])

    def settle(self, sequence_id: int, count: int) -> None:
        ahead = self._ahead.pop(sequence_id, ())
        if not ahead:
            return
        slots = [self.slots.held[sequence_id], *ahead]
        self.slots.held[sequence_id] = slots.pop(count)
        for slot in slots:
            self.slots.free(slot)

    def release(self, sequence_id: int) -> None:
        """Free all slots of a sequence. It is no error if it holds none."""
        self.settle(sequence_id, 0)
        self.slots.release(sequence_id)

    def end_plan(self) -> None:
        """Free the slots that the step leaves. None of its chunks is still to be planned."""
        for slot in self._left.values():
            self.slots.free(slot)
        self._left = {}

    def rebuild(self, sequence_ids: Container[int]) -> None:
        self.slots.held |= self._left  # what is being planned will not run
        self._left = {}
        self._ahead = {id: slots for id, slots in self._ahead.items() if id in sequence_ids}
        self.slots.keep(sequence_ids, self._slots_ahead)

    def _held_besides(self) -> list[int]:
        """Return the slots that are held besides those of sequences, once for each reference."""
        return [*self._left.values(), *self._slots_ahead]

    def check_integrity(self) -> None:
        assert self._ahead.keys() <= self.slots.held.keys(), "spare slots of a sequence that ended"
        self.slots.check_integrity(self._held_besides())


class StateMemory(KVMemory):
    """Adds a slot for each sequence to the memory that comes after it among a class's bases."""

    states: RunningStates

    def __init__(
        self, num_blocks: int, layout: KVLayout, *, states: RunningStates, **options: Any
    ) -> None:
        super().__init__(num_blocks, layout, **options)
        self.states = states
        self._slots = states.slots

    def reserve(self, spans: Collection[Span]) -> bool:
        new = [span.sequence_id for span in spans if span.sequence_id not in self._slots.held]
        if len(new) > self._slots.pool.num_free or not super().reserve(spans):
            return False
        self._slots.take(new)
        return True

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Share the parent's state, which must stand exactly at `num_tokens` tokens."""
        super().fork(parent_id, child_id, num_tokens)
        self._slots.share(parent_id, child_id)

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self.states.release(sequence_id)

    def take_moves(self) -> BlockMoves:
        self.states.end_plan()
        return super().take_moves()

    def rebuild(self, sequence_ids: Container[int]) -> None:
        super().rebuild(sequence_ids)
        self.states.rebuild(sequence_ids)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.states.check_integrity()
        assert self._slots.held.keys() == self._tables.keys(), "a sequence lacks blocks, or a slot"


class StateSlotMemory(StateMemory, SlotMemory):
    """Reserved runs of blocks, and slots."""
