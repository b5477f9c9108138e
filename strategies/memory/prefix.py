"""The prefix cache: which block holds the K/V of which prefix.

K and V of a token depend on every token before it, so a chain of hashes identifies a block:

```
salt ──▶ H ──▶ H(·, tokens 0:16) ──▶ H(·, tokens 16:32) ──▶ ...
                  block 7               block 3
```

The contents of a block are what its tokens stand for (`Sequence.content`).

The hash is blake2b with a random key of this process. So no client can craft a prompt whose hash
collides with another prompt's, or compute the hash of a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b

Digest = bytes
DIGEST_BYTES = 16


class PrefixCache:
    """Maps prefixes to the full block that ends each of them. Full blocks no longer change."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._blocks: dict[Digest, int] = {}
        self._digests: dict[int, Digest] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, contents: Iterable[bytes], salt: str) -> list[int]:
        """Return the blocks of the longest cached prefix. contents: one item for each block."""
        blocks: list[int] = []
        digest = self.root(salt)
        for content in contents:
            digest = self._next(digest, content)
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def root(self, salt: str) -> Digest:
        """Return the parent hash of a first block. Different salts share no blocks."""
        return blake2b(salt.encode(), key=self._key, digest_size=DIGEST_BYTES).digest()

    def digest(self, block: int) -> Digest:
        return self._digests[block]

    def add(self, block: int, parent: Digest, content: bytes) -> int:
        """Add a block, unless its prefix is already cached. Returns the block of that prefix."""
        digest = self._next(parent, content)
        cached = self._blocks.setdefault(digest, block)
        if cached == block:
            self._digests[block] = digest
        return cached

    def remove(self, block: int) -> None:
        """Remove a block. `find` no longer reaches the blocks that follow it in a chain."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._blocks[digest]

    def _next(self, parent: Digest, content: bytes) -> Digest:
        return blake2b(parent + content, key=self._key, digest_size=DIGEST_BYTES).digest()
