"""Paged memory of models with states: blocks, slots, and cached prefixes that need both."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from core.plan import BlockMoves, BlockPairs, BlockTable, Chunk, StateSlots
from core.sampling import Finish
from core.sequence import Sequence
from strategies.memory.blocks import PagedMemory
from strategies.memory.prefix import Digest, Key, PrefixCache
from strategies.memory.states import RunningStates, Slots, StateMemory
from strategies.memory.windows import WindowedMemory

if TYPE_CHECKING:
    from core.configuration.kv_layout import KVLayout

TAIL = -1
"""In the keys of cached blocks that are not full, in place of a cache group."""
CONTINUED = (Finish.EOS, Finish.STOP, Finish.LENGTH)
"""The finish reasons of answers that a next turn may continue."""


class CheckpointedStates(RunningStates):
    """The slots of running sequences, and spare ones for checkpoints.

    A free slot keeps its checkpoint until it is needed, whichever it is. Of the spare slots, one is
    in use

    * for each checkpoint that a step in flight writes;
    * for each checkpoint that the step that is being planned reads, and that stays. If no slot is
      spare, the sequence that has found it overwrites it.
    """

    def __init__(self, count: int, num_spare: int = 0, num_checkpoints: int = 0) -> None:
        """num_checkpoints: slots besides the `count`, of which `num_spare` are for `with_ahead`."""
        super().__init__(count + num_checkpoints, num_spare)
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
        self.slots.checkpoints.forget(slot)
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


class _Prefix(NamedTuple):
    """A cached prefix with a checkpoint."""

    num_tokens: int
    blocks: tuple[int, ...]
    slot: int


class _PrefixesOfPrompts(PrefixCache):
    """Tells the tokens of answers from equal ones of prompts."""

    def content(self, sequence: Sequence, start: int, end: int) -> bytes:
        num_answered = max(0, end - max(start, sequence.num_prompt_tokens))
        return super().content(sequence, start, end) + num_answered.to_bytes(4)


class StatePagedMemory(StateMemory, PagedMemory):
    """Blocks on demand, and slots. Both are swapped together.

    With checkpoints, prefixes are cached. If the last block of a prefix is evicted, so is its
    checkpoint; the next longest prefix with a checkpoint is found then.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        *,
        states: CheckpointedStates,
        checkpoint_tokens: int = 1,
        answers_differ: bool = False,
        num_host_blocks: int = 0,
        num_host_states: int = 0,
    ) -> None:
        """checkpoint_tokens: leave a checkpoint after so many tokens of a prompt, rounded to whole
        blocks. answers_differ: a token of an answer has another state than one of a prompt. So a
        next turn finds prompts only.

        If there are checkpoints, the layout has one group, without a window.
        """
        self._answers_differ = answers_differ
        has_checkpoints = states.num_checkpoints > 0
        assert layout.keeps_all or not has_checkpoints, "only whole prefixes have checkpoints"
        super().__init__(
            num_blocks,
            layout,
            states=states,
            num_host_blocks=num_host_blocks,
            caches_prefixes=has_checkpoints,
            kind_of_prefixes=_PrefixesOfPrompts if answers_differ else PrefixCache,
        )
        self._checkpointed = states
        """The same object as `states`, typed as CheckpointedStates."""
        whole_blocks = checkpoint_tokens // self.block_size
        self._checkpoint_tokens = max(1, whole_blocks) * self.block_size
        self._host_slots = Slots(num_host_states)
        self._state_swap_outs: BlockPairs = ()
        self._state_swap_ins: BlockPairs = ()

    def adopt(self, sequence: Sequence, forked_at: int | None = None) -> int:
        """Give a sequence that holds no blocks those of a cached prefix, and its state.

        forked_at: other sequences will fork from its first tokens, where its state must stand then.
        So no longer prefix is adopted.
        """
        assert sequence.id not in self._tables, "the sequence already holds blocks"
        if not self.caches_prefixes:
            return 0
        limit = sequence.num_skippable_tokens
        limit = limit if forked_at is None else min(limit, forked_at)
        last = limit // self.block_size * self.block_size
        num_cached = self._prefixes.longest(0, sequence, last)
        found = next(self._found(sequence, num_cached, limit), None)
        num_found = 0
        if found is not None:
            num_found = found.num_tokens
            self._pool.share(found.blocks)
            self._tables[sequence.id] = (BlockTable(found.blocks),)
            self._checkpointed.begin(sequence.id, found.slot)
        every = self._checkpoint_tokens
        positions = {last, num_cached, *range(every, last, every)}
        self._checkpointed.want(sequence.id, (some for some in positions if some > num_found))
        return num_found

    def _found(self, sequence: Sequence, num_cached: int, limit: int) -> Iterator[_Prefix]:
        """Yield the prefixes of a sequence, up to `limit`, that it can begin with; longest first.

        num_cached: tokens at its start whose blocks are cached.
        """
        prefixes, checkpoints = self._prefixes, self._slots.checkpoints
        blocks = [
            prefixes.block(prefixes.key(0, sequence, number))
            for number in range(num_cached // self.block_size)
        ]
        whole = tuple(block for block in blocks if block is not None)
        for number in range(len(whole), -1, -1):
            base, start = self._base(sequence, number), number * self.block_size
            for count in checkpoints.tails(base, limit - start):
                prefix = self._prefix(sequence, base, start, start + count)
                slot, tail = checkpoints.find(prefix), prefixes.block((TAIL, prefix))
                if slot is not None and tail is not None and self._checkpointed.can_begin(slot):
                    yield _Prefix(start + count, (*whole[:number], tail), slot)
            slot = checkpoints.find(base) if number else None
            if slot is not None and self._checkpointed.can_begin(slot):
                yield _Prefix(start, whole[:number], slot)

    def _base(self, sequence: Sequence, num_blocks: int) -> Digest:
        """Return what identifies the first blocks of a sequence."""
        if num_blocks == 0:
            return self._prefixes.hash(sequence.prefix_salt.encode())
        return self._prefixes.key(0, sequence, num_blocks - 1)[1]

    def _prefix(self, sequence: Sequence, base: Digest, start: int, end: int) -> Digest:
        """Return what identifies a prefix whose whole blocks, up to `start`, are `base`."""
        if start == end:
            return base
        return self._prefixes.hash(base + self._prefixes.content(sequence, start, end))

    def commit(self, chunk: Chunk) -> None:
        super().commit(chunk)
        if not chunk.state.kept:
            return
        for length, slot in self._checkpointed.take_kept(chunk):
            number = (chunk.start + length) // self.block_size - 1
            key = self._prefixes.key(0, chunk.sequence, number)
            if self._prefixes.has(key):
                self._slots.checkpoints.add(key[1], slot)
            self._slots.free(slot)

    def end(self, sequence: Sequence) -> None:
        """Free the blocks and the slot of a sequence. They stay cached if its answer is whole."""
        slot = self._checkpointed.slot_at(sequence)
        is_whole = sequence.finish in CONTINUED and not self._answers_differ
        if self.caches_prefixes and slot is not None and is_whole:
            self._keep_end(sequence, slot)
        super().end(sequence)

    def _keep_end(self, sequence: Sequence, slot: int) -> None:
        """Leave a checkpoint at the end of what a sequence has computed.

        A chunk in flight may have filled a block, which is not cached yet and counts as a tail.
        """
        end, is_in_flight = sequence.num_computed_tokens, sequence.num_in_flight > 0
        number = (end - is_in_flight) // self.block_size
        start, base = number * self.block_size, self._base(sequence, number)
        if number and not self._prefixes.has((0, base)):
            return
        prefix = self._prefix(sequence, base, start, end)
        checkpoints = self._slots.checkpoints
        if not checkpoints.add(prefix, slot):
            return
        if start < end:
            self._prefixes.add(self.tables(sequence.id)[0].blocks[number], (TAIL, prefix))
            checkpoints.add_tail(base, end - start, prefix)
        if is_in_flight:
            checkpoints.wait_for(sequence.id, prefix)

    def _forget(self, block: int) -> Key | None:
        key = super()._forget(block)
        slot = self._slots.checkpoints.remove(key[1]) if key is not None else None
        if slot is not None:
            self._slots.pool.empty(slot)
        return key

    def swap_out(self, sequence_ids: Iterable[int]) -> bool:
        ids = [id for id in sequence_ids if id in self._slots.held]
        num_slots = len({self._slots.held[id] for id in ids})
        if (
            any(map(self._checkpointed.has_ahead, ids))
            or num_slots > self._host_slots.pool.num_free
        ):
            return False
        if not super().swap_out(ids):
            return False
        self._state_swap_outs += self._slots.move(ids, self._host_slots)
        return True

    def swap_in(self, sequence_ids: Iterable[int]) -> None:
        ids = [id for id in sequence_ids if id in self._host_slots.held]
        super().swap_in(ids)
        self._state_swap_ins += self._host_slots.move(ids, self._slots)

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self._host_slots.release(sequence_id)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        super().fork(parent_id, child_id, num_tokens)
        self._host_slots.share(parent_id, child_id)

    def take_moves(self) -> BlockMoves:
        moves = super().take_moves()
        if self._state_swap_outs or self._state_swap_ins:
            moves = replace(
                moves,
                state_swap_outs=self._state_swap_outs,
                state_swap_ins=self._state_swap_ins,
            )
            self._state_swap_outs = self._state_swap_ins = ()
        return moves

    def rebuild(self, sequence_ids: Container[int]) -> None:
        super().rebuild(sequence_ids)
        self._host_slots.keep(sequence_ids)

    def check_integrity(self) -> None:
        super().check_integrity()
        self._host_slots.check_integrity()
        assert self._host_slots.held.keys() == self._swapped.keys()


class WindowedStateMemory(StatePagedMemory, WindowedMemory):
    """With sliding windows besides, and so without checkpoints."""
