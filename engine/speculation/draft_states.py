"""Drafts of a model whose layers keep a state, from which no token can be taken back.

A sequence has two rows of states while it is drafted for. One has the state after its known tokens,
and only they are read into it. Drafts are read into the other one. So those that were wrong are
taken back by going on from the first row, where those that were right are read again.

```
tokens of the sequence | a b c            row 5: after c
drafts                 |       x y        row 5 ▶ x ▶ row 2 ▶ y ▶ row 2
                                          row 2 is free again, for whichever sequence
tokens of the sequence | a b c x z        row 5 ▶ x z ▶ row 5
```

A sequence without a row begins anew, from its first token.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Items

from msgspec.structs import replace

from core.plan import Chunk, StateSlots
from core.sequence import Sequence
from engine.speculation.draft_model import DraftLookup, DraftModel, DraftSettings
from strategies.speculation.proposer import Wanted


class DraftStates:
    """Which sequence has which of the rows `0 : count`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.known: dict[int, int] = {}
        """By sequence id, the longest unused first: the row with the state after known tokens."""
        self._drafts: dict[int, int] = {}
        """By sequence id: the row that drafts are read into."""
        self._free = [*range(count)]

    def take(self, sequence_id: int) -> bool:
        """Give a sequence the rows that it lacks. Return False, and give none, if they lack."""
        num_missing = 1 if sequence_id in self.known else 2
        if num_missing > len(self._free):
            return False
        row = self.known.pop(sequence_id) if sequence_id in self.known else self._free.pop()
        self.known[sequence_id] = row  # the last one now
        self._drafts[sequence_id] = self._free.pop()
        return True

    def of(self, sequence_id: int, num_drafts: int) -> StateSlots:
        """Return the rows of a chunk that begins after so many drafts; below 0: with known tokens.

        It reads none if it begins with the sequence.
        """
        known, drafts = self.known[sequence_id], self._drafts[sequence_id]
        return StateSlots(drafts if num_drafts > 0 else known, drafts if num_drafts >= 0 else known)

    def end_drafts(self) -> None:
        """Free the rows with drafts."""
        self._free += self._drafts.values()
        self._drafts.clear()

    def release(self, sequence_id: int) -> None:
        """Free the rows of a sequence. It is no error if it has none."""
        for rows in (self.known, self._drafts):
            if sequence_id in rows:
                self._free.append(rows.pop(sequence_id))

    def check_integrity(self) -> None:
        """Raise AssertionError if a row is lost, or two have it."""
        rows = [*self._free, *self.known.values(), *self._drafts.values()]
        assert sorted(rows) == [*range(self.count)], "a row is lost, or two have it"


class StateDraftModel(DraftModel):
    caches_prefixes = False  # their blocks have no state to go on from

    def __init__(self, settings: DraftSettings, num_states: int) -> None:
        """num_states: the rows of states that the executor has, see `num_draft_states`."""
        super().__init__(settings)
        self.states = DraftStates(num_states)

    def _make_lookup(self, sequence: Sequence) -> DraftLookup:
        return StateLookup(sequence, self.longest)

    def completed(self, wanted: Items[Wanted]) -> list[tuple[int, ...]]:
        """As in a draft model: none also for a sequence for which there are no rows."""
        drafts = super().completed(wanted)
        self.states.end_drafts()
        for one in wanted:
            if isinstance(one.lookup, StateLookup):
                one.lookup.forget_drafts()
        return drafts

    def _reserve(self, lookup: DraftLookup, end: int, wanted: Container[DraftLookup]) -> bool:
        """Reserve rows as well. The sequence that has not used its own for longest loses them."""
        while not self.states.take(lookup.sequence.id):
            others = (self._lookups[id] for id in self.states.known)
            idle = next((other for other in others if other not in wanted), None)
            if idle is None:
                return False
            self._forget(idle)
        return super()._reserve(lookup, end, wanted)

    def _free(self, sequence_id: int) -> None:
        super()._free(sequence_id)
        self.states.release(sequence_id)

    def _chunk(self, lookup: DraftLookup, length: int) -> Chunk:
        plain = super()._chunk(lookup, length)
        state = self.states.of(plain.sequence.id, plain.start - lookup.num_known)
        return replace(plain, state=state)


class StateLookup(DraftLookup):
    def forget_drafts(self) -> None:
        """Go on after the known tokens: there is a state after them, or a part of them."""
        self.num_read = min(self.num_read, self.num_known)

    def catch_up(self) -> int:
        """As in a draft model; but where the newest token was read before, all are read again."""
        num_read = self.num_read
        num_known = super().catch_up()
        if self.num_read < num_read:
            self.num_read = 0
        return num_known
