"""The prefix cache: which block holds the K/V of which prefix.

K and V of a token depend on every token before it, so a chain of hashes identifies a prefix:

```
salt ──▶ H ──▶ H(·, tokens 0:16) ──▶ H(·, tokens 16:32) ──▶ ...
group 0           block 7               block 3
group 1                                 block 5                  of 32 tokens
```

The contents of a link are what its tokens stand for (`Sequence.content`).

The hash is blake2b with a random key of this process. So no client can craft a prompt whose hash
collides with another prompt's, or compute the hash of a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Groups
from hashlib import blake2b
from math import gcd, lcm
from typing import TYPE_CHECKING

from core.plan import BlockTable
from core.sequence import Sequence

if TYPE_CHECKING:
    from core.configuration.kv_layout import CacheGroup

Digest = bytes
DIGEST_BYTES = 16
Key = tuple[int, Digest]
"""The index of a cache group, and a prefix."""


class PrefixCache:
    """Maps prefixes to the full block that ends each of them. Full blocks no longer change."""

    def __init__(self, groups: Groups[CacheGroup]) -> None:
        self.groups = groups
        sizes = [group.block_size for group in groups]
        self._link_tokens = gcd(*sizes)
        self.hit_tokens = lcm(*sizes)
        """Prefixes are found in multiples of this."""
        self._secret = os.urandom(32)
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._digests: dict[int, list[Digest]] = {}
        """By sequence id: the digests of its prefixes, as far as they were needed."""

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def has(self, key: Key) -> bool:
        return key in self._blocks

    def block(self, key: Key) -> int | None:
        """Return the block with a key, if it is cached."""
        return self._blocks.get(key)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, sequence: Sequence, limit: int) -> tuple[BlockTable, ...]:
        """Return the tables of the longest prefix, of up to `limit` tokens, that all groups have.

        A group with a window only needs the blocks that the next token sees.
        """
        length, index, num_agreeing = limit // self.hit_tokens * self.hit_tokens, 0, 0
        while num_agreeing < len(self.groups):
            found = self.longest(index, sequence, length)
            num_agreeing = num_agreeing + 1 if found == length else 1
            length, index = found, (index + 1) % len(self.groups)
        return tuple(self._table(index, sequence, length) for index in range(len(self.groups)))

    def longest(self, index: int, sequence: Sequence, limit: int) -> int:
        """Return the length of the longest prefix, of up to `limit` tokens, that a group has."""
        group = self.groups[index]
        while limit > 0:
            needed = range(group.first_block(limit), limit // group.block_size)
            order = needed if group.window is None else reversed(needed)
            missing = next((i for i in order if not self.has(self.key(index, sequence, i))), -1)
            if missing < 0:
                break
            limit = missing * group.block_size // self.hit_tokens * self.hit_tokens
        return limit

    def _table(self, index: int, sequence: Sequence, length: int) -> BlockTable:
        group = self.groups[index]
        first, end = group.first_block(length), length // group.block_size
        blocks = (self._blocks[self.key(index, sequence, i)] for i in range(first, end))
        return BlockTable((0,) * first + tuple(blocks), first)

    def key(self, index: int, sequence: Sequence, block: int) -> Key:
        """Return what identifies block number `block` of a sequence in group `index`."""
        digests = self._digests.setdefault(sequence.id, [])
        link = self._link_tokens
        end = (block + 1) * self.groups[index].block_size
        for start in range(len(digests) * link, end, link):
            parent = digests[-1] if digests else self.hash(sequence.prefix_salt.encode())
            digests.append(self.hash(parent + self.content(sequence, start, start + link)))
        return index, digests[end // link - 1]

    def content(self, sequence: Sequence, start: int, end: int) -> bytes:
        """Return bytes that identify what K and V of the tokens `start : end` are computed from."""
        return sequence.content(start, end)

    def hash(self, content: bytes) -> Digest:
        return blake2b(content, key=self._secret, digest_size=DIGEST_BYTES).digest()

    def add(self, block: int, key: Key) -> int:
        """Add a block, unless its prefix is already cached. Returns the block of that prefix."""
        cached = self._blocks.setdefault(key, block)
        if cached == block:
            self._keys[block] = key
        return cached

    def remove(self, block: int) -> Key | None:
        """Remove a block and return its key, if it was cached."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
        return key

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Note that the first tokens of two sequences are the same."""
        digests = self._digests.get(parent_id, [])
        self._digests[child_id] = digests[: num_tokens // self._link_tokens]

    def release(self, sequence_id: int) -> None:
        """Forget a sequence, whose tokens may change."""
        self._digests.pop(sequence_id, None)
