"""How many states fit into memory: the arithmetic that the engine and `longshore plan` share."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DRAFTING = 4
"""How many sequences may have all their drafts in one step. More hardly pay."""

MOST_DRAFTED = 16
"""How many sequences a draft model keeps states of. For more, its passes hardly pay."""
LEAST_DRAFT_STATES = 4
"""So many sequences are in the passes that are timed at the start."""


def num_spare_states(num_drafts: int, max_sequences: int) -> int:
    """Return the slots for the states after each of a sequence's `num_drafts` drafts."""
    return num_drafts * min(MOST_DRAFTING, max_sequences)


def num_draft_states(max_sequences: int, bytes_each: int, num_bytes: int | None = None) -> int:
    """Return the rows for a draft model's states: two of each sequence that it drafts for.

    num_bytes: those for K, V and states, of which they take up to a quarter; None: no limit.
    """
    wanted = 2 * min(MOST_DRAFTED, max_sequences)
    most = wanted if num_bytes is None else num_bytes // 4 // bytes_each
    return max(LEAST_DRAFT_STATES, min(wanted, most))


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of states, for running sequences and for drafts that may be taken back."""

    bytes_each: int
    num_running: int
    num_spare: int = 0

    @property
    def count(self) -> int:
        return self.num_running + self.num_spare

    @property
    def num_bytes(self) -> int:
        return self.bytes_each * self.count

    def share(self, num_bytes: int, sequence_bytes: int) -> int:
        """Return how many of the bytes for K, V and states may be states: half of them.

        Where the longest sequence has less K and V than state, as in models of states alone, it is
        more: so much that both suffice for as many such sequences. sequence_bytes: its K and V.
        """
        part = num_bytes * self.bytes_each // (self.bytes_each + sequence_bytes)
        return max(num_bytes // 2, part)

    def within(self, num_bytes: int, least: int = 1) -> StateSlots:
        """Return as many slots as these bytes hold, but of running sequences at least `least`.

        At most half of them are spare.
        """
        if self.num_bytes <= num_bytes:
            return self
        count = max(least, num_bytes // self.bytes_each)
        num_spare = min(self.num_spare, count // 2)
        return StateSlots(self.bytes_each, count - num_spare, num_spare)

    def num_besides(self, num_bytes: int) -> int:
        """Return how many more slots than these the bytes hold."""
        return max(0, num_bytes // self.bytes_each - self.count)
