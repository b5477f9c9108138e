"""Paged memory of models with states: blocks, slots, and cached prefixes that need both."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from core.plan import BlockMoves, BlockTable, Chunk
from core.sampling import Finish
from core.sequence import Sequence
from strategies.memory.blocks import PagedMemory
from strategies.memory.checkpointed_states import CheckpointedStates
from strategies.memory.prefix import Digest, Key, PrefixCache
from strategies.memory.states import StateMemory
from strategies.memory.windows import WindowedMemory

if TYPE_CHECKING:
    from core.configuration.kv_layout import KVLayout

TAIL = -1
"""In the keys of cached blocks that are not full, in place of a cache group."""
CONTINUED = (Finish.EOS, Finish.STOP, Finish.LENGTH)
"""The finish reasons of answers that a next turn may continue."""


class _Prefix(NamedTuple):
    """A cached prefix with a checkpoint."""

    num_tokens: int
    blocks: tuple[int, ...]
    slot: int
    is_on_host: bool


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
        self._on_device, self._host_slots = states.on_device, states.on_device.host

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
            begin = self._checkpointed.begin
            if found.is_on_host:
                begin = self._on_device.begin_with_copy
            begin(sequence.id, found.slot)
        every = self._checkpoint_tokens
        positions = {last, num_cached, *range(every, last, every)}
        self._checkpointed.want(sequence.id, (some for some in positions if some > num_found))
        return num_found

    def _found(self, sequence: Sequence, num_cached: int, limit: int) -> Iterator[_Prefix]:
        """Yield the prefixes of a sequence, up to `limit`, that it can begin with; longest first.

        num_cached: tokens at its start whose blocks are cached.
        """
        prefixes = self._prefixes
        blocks = [
            prefixes.block(prefixes.key(0, sequence, number))
            for number in range(num_cached // self.block_size)
        ]
        whole = tuple(block for block in blocks if block is not None)
        for number in range(len(whole), -1, -1):
            base, start = self._base(sequence, number), number * self.block_size
            for count in self._tails(base, limit - start):
                prefix = self._prefix(sequence, base, start, start + count)
                tail = prefixes.block((TAIL, prefix))
                if tail is not None:
                    yield from self._states_after(prefix, start + count, (*whole[:number], tail))
            if number:
                yield from self._states_after(base, start, whole[:number])

    def _tails(self, base: Digest, most: int) -> list[int]:
        """Return how many tokens the tails have after these whole blocks; the most first."""
        counts = (slots.checkpoints.tails(base, most) for slots in (self._slots, self._host_slots))
        return sorted({*chain.from_iterable(counts)}, reverse=True)

    def _states_after(
        self, prefix: Digest, num_tokens: int, blocks: tuple[int, ...]
    ) -> Iterator[_Prefix]:
        """Yield where the state after a prefix is, on the device first."""
        slot = self._slots.checkpoints.find(prefix)
        if slot is not None and self._checkpointed.can_begin(slot):
            yield _Prefix(num_tokens, blocks, slot, is_on_host=False)
        slot = self._host_slots.checkpoints.find(prefix)
        if slot is not None:
            yield _Prefix(num_tokens, blocks, slot, is_on_host=True)

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
        if key is not None:
            for slots in (self._slots, self._host_slots):
                slot = slots.checkpoints.remove(key[1])
                if slot is not None:
                    slots.pool.empty(slot)
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
        self._on_device.swap_out(ids)
        return True

    def swap_in(self, sequence_ids: Iterable[int]) -> None:
        ids = [id for id in sequence_ids if id in self._host_slots.held]
        super().swap_in(ids)
        self._on_device.swap_in(ids)

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self._host_slots.release(sequence_id)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        super().fork(parent_id, child_id, num_tokens)
        self._host_slots.share(parent_id, child_id)

    def take_moves(self) -> BlockMoves:
        moves, (outs, ins) = super().take_moves(), self._on_device.take_moves()
        if outs or ins:
            moves = replace(moves, state_swap_outs=outs, state_swap_ins=ins)
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
