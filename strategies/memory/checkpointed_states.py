"""The slots of running sequences and of checkpoints on the device."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import chain

from core.plan import BlockMoves, Chunk, StateSlots
from core.sequence import Sequence
from strategies.memory.host_slots import DeviceSlots, HostSlots
from strategies.memory.states import RunningStates


class CheckpointedStates(RunningStates):
    """The slots of running sequences, and spare ones for checkpoints.

    A free slot keeps its checkpoint until it is needed, whichever it is. Of the spare slots, one is
    in use

    * for each checkpoint that a step in flight writes;
    * for each checkpoint that the step that is being planned reads, and that stays. If no slot is
      spare, the sequence that has found it overwrites it.
    """

    def __init__(
        self,
        count: int,
        num_spare: int = 0,
        num_checkpoints: int = 0,
        host: HostSlots | None = None,
    ) -> None:
        """num_checkpoints: slots besides the `count`, of which `num_spare` are for `with_ahead`.

        host: where swapped states and further checkpoints go; None: nowhere.
        """
        self.on_device = DeviceSlots(count + num_checkpoints, host or HostSlots(0))
        """The same object as `slots`, typed as DeviceSlots."""
        super().__init__(self.on_device, num_spare)
        self.num_checkpoints = num_checkpoints
        self._read: set[int] = set()
        """Checkpoints that the step that is being planned reads, in spare slots."""
        self._num_written = 0
        self._wanted: dict[int, list[int]] = {}
        """By sequence id: the positions where to leave checkpoints, the first one last."""
        self._in_flight: dict[int, list[StateSlots]] = {}
        """By sequence id: the slots of chunks that leave checkpoints and are not committed."""
        self._places: dict[int, int] = {}
        """By sequence id: after how many tokens its state is."""

    @property
    def has_room(self) -> bool:
        return len(self._read) + self._num_written < self.num_checkpoints

    def can_hold(self, num_places: int) -> bool:
        return num_places <= self.slots.count - self._num_spare - self.num_checkpoints

    def can_begin(self, slot: int) -> bool:
        """Whether a sequence can begin with the state in this slot, which has a checkpoint."""
        return self.slots.pool.num_references(slot) == 0 or slot in self._read or self.has_room

    def begin(self, sequence_id: int, slot: int) -> None:
        if self.slots.pool.num_references(slot) > 0:
            self._read.add(slot)
        self.slots.held[sequence_id] = slot
        self.slots.pool.share((slot,))

    def want(self, sequence_id: int, positions: Iterable[int]) -> None:
        """Leave checkpoints at these positions of a sequence, as far as slots are spare."""
        self._wanted[sequence_id] = sorted(positions, reverse=True)

    def of(self, sequence: Sequence, end: int) -> StateSlots:
        self._places[sequence.id] = end
        slot = self.slots.held[sequence.id]
        if slot in self.slots.checkpoints and self.slots.pool.num_references(slot) == 1:
            state = self._after_checkpoint(sequence.id, slot)
        else:
            state = super().of(sequence, end)
        wanted = self._wanted.get(sequence.id)
        if wanted and wanted[-1] <= end:
            kept = tuple(self._kept(wanted, sequence.num_computed_tokens, end, state.writes))
            state = state._replace(kept=kept)
            self._in_flight.setdefault(sequence.id, []).append(state)
        return state

    def _after_checkpoint(self, sequence_id: int, slot: int) -> StateSlots:
        """Return the slots of a sequence that holds a checkpoint, which no other one holds."""
        if slot in self._read or self.has_room:
            self._read.add(slot)
            return self._leave(sequence_id, slot)
        self.slots.evict(slot)
        return StateSlots(slot, slot)

    def _kept(self, wanted: list[int], start: int, end: int, own: int) -> Iterator[tuple[int, int]]:
        """Yield the wanted checkpoints of a chunk. own: the slot that gets the state at its end."""
        while wanted and wanted[-1] <= end:
            position = wanted.pop()
            if not self.has_room:
                continue
            self._num_written += 1
            if position < end:
                yield position - start, self.slots.allocate()
            else:
                self.slots.pool.share((own,))
                yield position - start, own

    def settle(self, sequence_id: int, count: int) -> None:
        if self.has_ahead(sequence_id):
            self._places[sequence_id] += count
        super().settle(sequence_id, count)

    def slot_at(self, sequence: Sequence) -> int | None:
        """Return the slot of a sequence, if its state is where its computed tokens end.

        It is not if an accepted draft came after the end of the answer.
        """
        is_there = self._places.get(sequence.id) == sequence.num_computed_tokens
        return self.slots.held.get(sequence.id) if is_there else None

    def take_kept(self, chunk: Chunk) -> tuple[tuple[int, int], ...]:
        """Return the checkpoints of a chunk that is computed. The caller frees their slots.

        There are none if the sequence has lost its slots since the chunk was planned.
        """
        states = self._in_flight.get(chunk.sequence.id, [])
        index = next((i for i, state in enumerate(states) if state is chunk.state), None)
        if index is None:
            return ()
        kept = states.pop(index).kept
        self._num_written -= len(kept)
        return kept

    def computed(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self.slots.checkpoints.computed(chunk.sequence.id)

    def lose(self, moves: BlockMoves) -> None:
        self.on_device.lose(place for _, place in moves.state_swap_outs)

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self._wanted.pop(sequence_id, None)
        self._places.pop(sequence_id, None)
        for _, slot in _kept_by(self._in_flight.pop(sequence_id, ())):
            self._num_written -= 1
            self.slots.free(slot)

    def end_plan(self) -> None:
        super().end_plan()
        self._read.clear()

    def rebuild(self, sequence_ids: Container[int]) -> None:
        super().rebuild(sequence_ids)
        self._wanted = {id: some for id, some in self._wanted.items() if id in sequence_ids}
        self._places = {id: place for id, place in self._places.items() if id in sequence_ids}
        self._in_flight = {}
        self._read.clear()
        self._num_written = 0

    def _held_besides(self) -> list[int]:
        kept = _kept_by(chain.from_iterable(self._in_flight.values()))
        return [*super()._held_besides(), *(slot for _, slot in kept)]

    def check_integrity(self) -> None:
        super().check_integrity()
        num_kept = len([*_kept_by(chain.from_iterable(self._in_flight.values()))])
        assert num_kept == self._num_written <= self.num_checkpoints, "too many slots are taken"


def _kept_by(states: Iterable[StateSlots]) -> Iterator[tuple[int, int]]:
    return chain.from_iterable(state.kept for state in states)
