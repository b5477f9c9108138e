"""The interface of KV memory, whichever way it allocates blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from core.plan import NO_STATE, BlockMoves, BlockTable, Chunk, StateSlots

if TYPE_CHECKING:
    from core.configuration.kv_layout import CacheGroup, KVLayout
    from core.sequence import Sequence as TokenSequence


class Span(NamedTuple):
    """Positions `start : end` of a sequence, which a step will write."""

    sequence_id: int
    start: int
    end: int


class States:
    """The states that sequences keep beside K and V: none, unless the model has some."""

    can_compute_twice: ClassVar[bool] = True
    """Whether tokens may be computed again after a step that failed on the way. A state would count
    twice those that it has passed."""

    @property
    def num_slots(self) -> int:
        return 0

    @property
    def kept_slots(self) -> Collection[int]:
        """Free slots whose state is kept, so that a later sequence may begin with it."""
        return ()

    def held(self, sequence_id: int) -> Collection[int]:
        """Return the slots of a sequence's state, and of those after tokens of `with_ahead`."""
        return ()

    def of(self, sequence: TokenSequence, end: int) -> StateSlots:
        """Return the slots of a sequence's state in its chunk up to `end`, which is planned now."""
        return NO_STATE

    def num_places(self, num_sequences: int, num_parents: int) -> int:
        """Return how many places in the batch a group of so many sequences takes.

        num_parents: the most of them that others fork from before one step.
        """
        return num_sequences

    def can_hold(self, num_places: int) -> bool:
        """Whether there is room for a group that takes so many places."""
        return True

    @property
    def num_ahead(self) -> int | None:
        """After how many more tokens of a step a state can be kept beside; None: there is none."""
        return None

    def with_ahead(self, sequence_id: int, state: StateSlots, count: int) -> StateSlots:
        """Return the slots of a chunk with `count` more tokens, up to `num_ahead`.

        Call `settle` before the next chunk of the sequence, once it is known which tokens stay.
        """
        return state

    def settle(self, sequence_id: int, count: int) -> None:
        """Keep the state after `count` of the tokens of `with_ahead`, and free the others.

        It is no error if the sequence has lost its states meanwhile.
        """

    def computed(self, chunks: Iterable[Chunk]) -> None:
        """Note that a step is computed, with the chunks of sequences that have ended since."""

    def lose(self, moves: BlockMoves) -> None:
        """Note that the moves of a plan have failed, before the next one is made.

        Call it besides ending the sequences that need them.
        """


class KVMemory(ABC):
    """Allocates blocks to sequences. A sequence has a block table in each cache group.

    An allocation that does not fit returns False and changes nothing. Some allocations require
    block moves before the next step writes. Those moves are collected until `take_moves`.
    """

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        self.num_blocks = num_blocks
        self.layout = layout
        self.block_size = layout.block_size
        self._tables: dict[int, tuple[BlockTable, ...]] = {}
        self._no_tables = (BlockTable(),) * len(layout.groups)
        self.states = States()
        self.copies: list[tuple[int, int]] = []
        self.swap_ins: list[tuple[int, int]] = []
        """The moves since `take_moves` that fill blocks of the device, as in `BlockMoves`."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int: ...

    @property
    def num_held_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def kept_blocks(self) -> Collection[int]:
        """Free blocks whose content is kept, so that a later sequence may share it."""
        return ()

    @property
    def num_slots(self) -> int:
        """Token slots in total. A block counts as `block_size` slots in every group."""
        return self.num_blocks * self.block_size

    @property
    def num_growth_blocks(self) -> int:
        """The most blocks that a sequence may need for its next token."""
        return len(self.layout.groups)

    def is_swapped(self, sequence_id: int) -> bool:
        """Whether the sequence's blocks are in host memory."""
        return False

    @abstractmethod
    def reserve(self, spans: Collection[Span]) -> bool:
        """Make every span writable.

        Its positions are then in the block tables, in blocks that no other sequence shares. At most
        one span per sequence. Returns False, and reserves none, if they do not all fit.
        """

    @abstractmethod
    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Give a child the first `num_tokens` tokens of its parent, in place of its own.

        The parent must still hold the windows of the token after them: it has committed no later
        token, or no layer has a window.
        """

    @abstractmethod
    def release(self, sequence_id: int) -> None:
        """Free all blocks of a sequence. It is no error if it holds none."""

    def end(self, sequence: TokenSequence) -> None:
        """Free all blocks of a sequence that has its finish reason."""
        self.release(sequence.id)

    @abstractmethod
    def commit(self, chunk: Chunk) -> None:
        """Note that a chunk is computed and its tokens are known.

        Its blocks can now be shared, and those that left a window are free.
        """

    def take_moves(self) -> BlockMoves:
        """Return the moves since the last call, which the next step must run first."""
        moves = BlockMoves(copies=tuple(self.copies))
        self.copies.clear()
        return moves

    def tables(self, sequence_id: int) -> tuple[BlockTable, ...]:
        """Return the block table of a sequence in each cache group."""
        return self._tables.get(sequence_id, self._no_tables)

    def held(self, sequence_id: int) -> list[int]:
        """Return the blocks of a sequence in all groups, each in logical order."""
        return held_blocks(self.tables(sequence_id))

    def num_empty_slots(self, sequence_id: int, num_tokens: int) -> int:
        """Return the slots that a sequence of `num_tokens` computed tokens has not written yet."""
        pairs = zip(self.layout.groups, self.tables(sequence_id), strict=True)
        return sum(
            empty_slots(self.layout, group, len(table.blocks), num_tokens) for group, table in pairs
        )

    def blocks_for(self, lengths: Sequence[int], num_shared_tokens: int = 0) -> int:
        """Return the most blocks that sequences hold together while they grow to these lengths.

        num_shared_tokens: how many of their first tokens are the same. They share full blocks.
        """
        return sum(
            self._blocks_in(group, lengths, num_shared_tokens) for group in self.layout.groups
        )

    def _blocks_in(self, group: CacheGroup, lengths: Sequence[int], num_shared_tokens: int) -> int:
        """Return the most blocks that sequences hold together in one group.

        ```
        lengths   |<-- full blocks ->|<- own ->|
                                     |<--- own --->|
        ```
        """
        num_shared = num_shared_tokens // group.block_size
        together = num_shared + sum(group.blocks_for(length) - num_shared for length in lengths)
        step_tokens = self.layout.step_tokens
        alone = sum(group.most_blocks(length, step_tokens) for length in lengths)
        return min(together, alone)

    @abstractmethod
    def rebuild(self, sequence_ids: Container[int]) -> None:
        """Keep only the tables of these sequences, and count free blocks anew.

        Call it after an exception that may have left the tables of other sequences half done. The
        moves since `take_moves` remain: tables that are kept may need them.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if a block is lost, or both held and free."""


def empty_slots(layout: KVLayout, group: CacheGroup, num_blocks: int, num_tokens: int) -> int:
    """Return the slots of a group's blocks that `num_tokens` tokens leave empty."""
    num_slots = max(0, num_blocks * group.block_size - num_tokens)
    return num_slots * layout.block_size // group.block_size


def held_blocks(tables: Sequence[BlockTable]) -> list[int]:
    """Return the blocks that these tables hold."""
    return [block for table in tables for block in table.held]
