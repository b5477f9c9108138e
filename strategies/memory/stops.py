"""Which blocks stay in the prefix cache after a sequence's window has left them.

A prefix is found only where the whole window before its end is cached. Most windows that a sequence
leaves behind end where no other prompt will ever part from it. If all of them were cached, they
would crowd out what is worth keeping; if none were, a shared system prompt would not be found.

```
request 1   |<-- system prompt -->|<-- own -->|       its windows were not kept
request 2   |<-- system prompt -->|<-- own -->|       only groups without a window
                                  ▲                   find the system prompt: a stop
request 3   |<-- system prompt -->|<-- own -->|       finds the window before the stop
```
"""

from __future__ import annotations

from collections.abc import Sequence as Blocks

from core.sequence import Sequence
from strategies.memory.prefix import Key, PrefixCache


class Stops:
    """Learns where prompts part, from prefixes that a window group alone no longer had."""

    def __init__(self, cache: PrefixCache, num_blocks: int) -> None:
        self._cache = cache
        self._groups = cache.groups
        self._keeps_all = all(group.window is not None for group in cache.groups)
        """No group tells where prompts part."""
        self._most_fates = 4 * num_blocks
        self._stops: dict[int, int] = {}
        """By sequence id: the tokens up to where it parted from an earlier sequence."""
        self._wanted: set[int] = set()
        """Blocks of windows before a stop."""
        self._fates: dict[Key, bool] = {}
        """Blocks that are no longer cached, newest last: whether a window left them unwanted. If
        not, they were evicted."""

    def learn(self, sequence: Sequence, limit: int) -> None:
        """Note where a sequence, whose prefix is now to be found, parts from earlier ones."""
        hit = self._cache.hit_tokens
        length = limit // hit * hit
        for index, group in enumerate(self._groups):
            if group.window is None:
                length = self._cache.longest(index, sequence, length)
        if length > 0 and self._part_at(sequence, length, limit):
            self._stops[sequence.id] = length

    def _part_at(self, sequence: Sequence, length: int, limit: int) -> bool:
        """Whether an earlier sequence dropped its windows before `length`, and went on differently.

        If the next block, or one of the window, was evicted instead, nothing new is known.
        """
        for index, group in enumerate(self._groups):
            end = length // group.block_size
            blocks = range(end, min(end + 1, limit // group.block_size))
            if group.window is not None:
                blocks = range(group.first_block(length), end)
            keys = [self._cache.key(index, sequence, block) for block in blocks]
            fates = {self._fates.get(key) for key in keys if not self._cache.has(key)}
            if False in fates or (group.window is not None and True not in fates):
                return False
        return True

    def unwanted(self, sequence_id: int, index: int, first: int, gone: Blocks[int]) -> list[int]:
        """Return which of these blocks, left by a window of group `index`, need not stay cached.

        gone: the sequence's blocks from number `first` on.
        """
        if self._keeps_all:
            return []
        group, stop = self._groups[index], self._stops.get(sequence_id, 0)
        start = group.first_block(max(0, stop - self._cache.hit_tokens))
        end = stop // group.block_size
        self._wanted.update(gone[max(0, start - first) : max(0, end - first)])
        return [block for block in gone if block not in self._wanted]

    def forget(self, block: int, key: Key, *, left_window: bool) -> None:
        """Note why a block is no longer cached: a window left it, or it was evicted."""
        self._wanted.discard(block)
        self._fates.pop(key, None)
        self._fates[key] = left_window
        if len(self._fates) > self._most_fates:
            del self._fates[next(iter(self._fates))]

    def release(self, sequence_id: int) -> None:
        self._stops.pop(sequence_id, None)
