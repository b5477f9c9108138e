"""Slots for states in the memory of the host: of swapped sequences, and checkpoints.

A slot of the device that is needed gives its checkpoint to a free slot here. A sequence that finds
it there begins with a copy; the checkpoint stays. All copies of a plan run before its forward pass,
those to the host first:

```
device   S: checkpoint ──▶ a new state       D: free ──▶ a sequence's own state
               │ out                              ▲ in
host     H: free ──▶ checkpoint ──────────────────┴────▶ checkpoint
```

So a slot that is read stays as it is until the plan is made.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from core.plan import BlockPairs
from strategies.memory.states import Slots


class HostSlots(Slots):
    """Free slots may have checkpoints; the one that was not read for longest goes first."""

    def __init__(self, count: int, most_checkpoints: int = 0) -> None:
        super().__init__(count)
        self._most_checkpoints = most_checkpoints
        self._read: list[int] = []
        """Slots that the plan that is being made reads, once for each time."""

    def read(self, slot: int) -> None:
        """Let nobody write a slot until the plan is made."""
        self.pool.share((slot,))
        self._read.append(slot)

    def end_plan(self) -> None:
        for slot in self._read:
            self.free(slot)
        self._read = []

    def make_room(self) -> int | None:
        """Take a slot for one more checkpoint. None: there is no room."""
        if len(self.checkpoints) >= self._most_checkpoints:
            oldest = next(iter(self.pool.kept), None)
            if oldest is None:
                return None
            self.evict(oldest)
            self.pool.empty(oldest)
        return self.allocate() if self.pool.num_free else None

    def keep(self, sequence_ids: Container[int], left: Collection[int] = ()) -> None:
        super().keep(sequence_ids, [*left, *self._read])

    def check_integrity(self, left: Iterable[int] = ()) -> None:
        super().check_integrity([*left, *self._read])


class DeviceSlots(Slots):
    """Slots of the device, whose checkpoints go to the host when they are needed."""

    def __init__(self, count: int, host: HostSlots) -> None:
        super().__init__(count)
        self.host = host
        self._outs: dict[int, int] = {}
        """Slots to copy to the host, by the slot there."""
        self._ins: dict[int, int] = {}
        """Slots of the host to copy from, by the slot here."""

    def evict(self, slot: int) -> None:
        place = self.host.make_room() if slot in self.checkpoints else None
        if place is not None:
            if self.checkpoints.move(slot, self.host.checkpoints, place):
                self._outs[place] = slot
            self.host.free(place)
        super().evict(slot)

    def begin_with_copy(self, sequence_id: int, place: int) -> None:
        """Let a sequence begin with a copy of a checkpoint on the host. A slot must be free."""
        self.host.read(place)
        self.held[sequence_id] = slot = self.allocate()
        self._ins[slot] = place

    def swap_out(self, sequence_ids: Iterable[int]) -> None:
        """Move the slots of these sequences to the host, which has room for them."""
        self._outs |= {place: slot for slot, place in self.move(sequence_ids, self.host)}

    def swap_in(self, sequence_ids: Collection[int]) -> None:
        """Move the slots of these sequences back. The caller has checked that they fit."""
        for id in sequence_ids:
            self.host.read(self.host.held[id])
        self._ins |= {slot: place for place, slot in self.host.move(sequence_ids, self)}

    def lose(self, places: Iterable[int]) -> None:
        """Remove the checkpoints of slots of the host into which nothing has been copied."""
        for place in places:
            self.host.evict(place)
            self.host.pool.empty(place)

    def take_moves(self) -> tuple[BlockPairs, BlockPairs]:
        """Return the copies to the host, and those from it, since the last call."""
        outs = tuple((slot, place) for place, slot in self._outs.items())
        ins = tuple((place, slot) for slot, place in self._ins.items())
        self.host.end_plan()
        self._outs, self._ins = {}, {}
        return outs, ins
