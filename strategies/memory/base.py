"""What a strategy may rely on of KV memory, however it hands out its blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import NamedTuple

from core.plan import BlockMoves, Chunk


class Span(NamedTuple):
    """Positions `start : end` of a sequence, to be written."""

    sequence_id: int
    start: int
    end: int


class KVMemory(ABC):
    """Hands blocks of `block_size` token slots to sequences, and takes them back.

    Nothing is ever half done: an allocation that does not fit returns False and changes nothing.
    What it decides may need blocks to be moved, before the next step writes into them: those moves
    pile up until `take_moves`.
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
    def num_tokens(self) -> int:
        """Token slots in all; the longest sequence that can ever run."""
        return self.num_blocks * self.block_size

    @abstractmethod
    def reserve(self, spans: Collection[Span]) -> bool:
        """Makes every span writable: its table reaches so far, and nobody else reads its blocks.

        All of them or none; at most one of each sequence.
        """

    @abstractmethod
    def reassign(
        self, sequence_ids: Collection[int], parents: Mapping[int, int], num_tokens: int
    ) -> None:
        """Each sequence in `parents` goes on from its parent's first `num_tokens` tokens.

        Both are among `sequence_ids`; of those, who is in no `parents` has nothing left.
        """

    @abstractmethod
    def release(self, sequence_id: int) -> None:
        """Gives back all blocks of the sequence. Releasing what holds nothing is no error."""

    @abstractmethod
    def commit(self, chunk: Chunk) -> None:
        """The chunk is computed, and all of its tokens are known: others may find its blocks."""

    def take_moves(self) -> BlockMoves:
        """The moves since it was last called, for the next step to begin with."""
        moves = BlockMoves(copies=tuple(self._copies))
        self._copies.clear()
        return moves

    def table(self, sequence_id: int) -> tuple[int, ...]:
        """The sequence's block table: its physical blocks in logical order."""
        return self._tables.get(sequence_id, ())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError where a block is lost, or held and free at once."""
