"""The interface of KV memory, whichever way it allocates blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container
from typing import NamedTuple

from core.plan import BlockMoves, Chunk


class Span(NamedTuple):
    """Positions `start : end` of a sequence, which a step will write."""

    sequence_id: int
    start: int
    end: int


class KVMemory(ABC):
    """Allocates blocks of `block_size` token slots to sequences.

    An allocation that does not fit returns False and changes nothing. Some allocations require
    block moves before the next step writes. Those moves are collected until `take_moves`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._tables: dict[int, tuple[int, ...]] = {}
        self._copies: list[tuple[int, int]] = []

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

    def is_swapped(self, sequence_id: int) -> bool:
        """Whether the sequence's blocks are in host memory."""
        return False

    @property
    def num_tokens(self) -> int:
        """Token slots in total: the length of the longest sequence that can ever run."""
        return self.num_blocks * self.block_size

    @abstractmethod
    def reserve(self, spans: Collection[Span]) -> bool:
        """Make every span writable.

        Its positions are then in the block table, in blocks that no other sequence shares. At most
        one span per sequence. Returns False, and reserves none, if they do not all fit.
        """

    @abstractmethod
    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Give a child the first `num_tokens` tokens of its parent, in place of its own."""

    @abstractmethod
    def release(self, sequence_id: int) -> None:
        """Free all blocks of a sequence. It is no error if it holds none."""

    @abstractmethod
    def commit(self, chunk: Chunk) -> None:
        """Note that a chunk is computed and its tokens are known, so blocks can now be shared."""

    def take_moves(self) -> BlockMoves:
        """Return the moves since the last call, which the next step must run first."""
        moves = BlockMoves(copies=tuple(self._copies))
        self._copies.clear()
        return moves

    def table(self, sequence_id: int) -> tuple[int, ...]:
        """Return the block table of a sequence: its physical blocks in logical order."""
        return self._tables.get(sequence_id, ())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @abstractmethod
    def rebuild(self, sequence_ids: Container[int]) -> None:
        """Keep only the tables of these sequences, and count free blocks anew.

        Call it after an exception that may have left the tables of other sequences half done. The
        moves since `take_moves` remain: tables that are kept may need them.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if a block is lost, or both held and free."""
