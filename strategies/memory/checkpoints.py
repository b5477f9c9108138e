"""Which slot holds the state at the end of which prefix: a checkpoint.

K and V of a prefix are of no use without the state at its end, and a state cannot be cut shorter.
So a prefix is found where its blocks are cached and a checkpoint was left:

* at the end of a prompt's last whole block, for prompts that differ only after it;
* every so many tokens of a long prompt, for prompts that part from it earlier;
* where an earlier lookup found blocks without a state: there two prompts have parted;
* at the end of an answer, for the next turn. It lies within a block, after a tail of some tokens.

```
blocks        |<- 0 ->|<- 1 ->|<- 2 ->|<- 3 ->|<- 4 ->|tail|
tokens        |<--------- prompt -------->|<--- answer --->|
checkpoints                           ▲                    ▲
```

No state is copied for that: a step writes into a further slot on its way, and a sequence that ends
leaves its own slot.
"""

from __future__ import annotations

from strategies.memory.prefix import Digest


class Checkpoints:
    """The slots with checkpoints, whether a sequence holds them or they are free."""

    def __init__(self) -> None:
        self._slots: dict[Digest, int] = {}
        self._prefixes: dict[int, Digest] = {}
        """By slot."""
        self._tails: dict[Digest, dict[Digest, int]] = {}
        """By a prefix of whole blocks: prefixes with a tail after it, and the tail's tokens."""
        self._bases: dict[Digest, Digest] = {}
        """The whole blocks of each prefix with a tail."""
        self._awaited: dict[int, Digest] = {}
        """By the id of a sequence that has ended: the prefix whose state a step in flight
        computes."""

    def __contains__(self, slot: int) -> bool:
        return slot in self._prefixes

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, prefix: Digest) -> int | None:
        """Return the slot with the state at the end of a prefix, if there is one."""
        return None if prefix in self._awaited.values() else self._slots.get(prefix)

    def tails(self, base: Digest, most: int) -> list[int]:
        """Return how many tokens, up to `most`, the tails have after these whole blocks; the most
        first."""
        counts = {*self._tails.get(base, {}).values()}
        return sorted((count for count in counts if count <= most), reverse=True)

    def add(self, prefix: Digest, slot: int) -> bool:
        """Note which slot has the state at the end of a prefix. False: another one has it."""
        if self._slots.setdefault(prefix, slot) != slot:
            return False
        assert self._prefixes.setdefault(slot, prefix) == prefix, "the slot has another state"
        return True

    def add_tail(self, base: Digest, num_tokens: int, prefix: Digest) -> None:
        """Note that a prefix ends with a tail of so many tokens."""
        self._tails.setdefault(base, {})[prefix] = num_tokens
        self._bases[prefix] = base

    def remove(self, prefix: Digest) -> int | None:
        """Remove a checkpoint. Returns its slot, if there was one."""
        slot = self._slots.pop(prefix, None)
        if slot is None:
            return None
        del self._prefixes[slot]
        if prefix in self._bases:
            base = self._bases.pop(prefix)
            del self._tails[base][prefix]
            if not self._tails[base]:
                del self._tails[base]
        self._awaited = {id: other for id, other in self._awaited.items() if other != prefix}
        return slot

    def forget(self, slot: int) -> None:
        """Remove the checkpoint that a slot has, if any."""
        if slot in self._prefixes:
            self.remove(self._prefixes[slot])

    def move(self, slot: int, target: Checkpoints, place: int) -> bool:
        """Move the checkpoint of a slot to `place`, a slot of `target`.

        False: it is not computed yet, or `target` has one of this prefix. Nothing has changed then.
        """
        prefix = self._prefixes[slot]
        if self.find(prefix) is None or not target.add(prefix, place):
            return False
        if prefix in self._bases:
            base = self._bases[prefix]
            target.add_tail(base, self._tails[base][prefix], prefix)
        self.remove(prefix)
        return True

    def wait_for(self, sequence_id: int, prefix: Digest) -> None:
        """Do not find a prefix until the next chunk of a sequence that has ended is computed."""
        self._awaited[sequence_id] = prefix

    def computed(self, sequence_id: int) -> None:
        self._awaited.pop(sequence_id, None)
