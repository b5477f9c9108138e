"""Which blocks hold the K/V of which prefix, so that no prefix is computed twice.

K and V of a token depend on every token before it, so a block is known by a chain of hashes:

```
salt ──▶ H ──▶ H(·, tokens 0:16) ──▶ H(·, tokens 16:32) ──▶ ...
                  block 7               block 3
```

The hash is blake2b under a random key of this process: nobody can choose a prompt that meets
another's blocks, nor tell by trying what the hash of a prompt is.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice

Digest = bytes
DIGEST_BYTES = 16


class PrefixCache:
    """Full blocks, whose tokens are computed and will not change, by the prefix that ends there."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._key = os.urandom(32)
        self._blocks: dict[Digest, int] = {}
        self._digests: dict[int, Digest] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """The blocks of the longest known prefix of these tokens, in whole blocks."""
        blocks: list[int] = []
        digest = self.root(salt)
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            digest = self._next(digest, islice(token_ids, start, start + self._block_size))
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def root(self, salt: str) -> Digest:
        """What the first block's hash is chained to. Different salts share nothing."""
        return blake2b(salt.encode(), key=self._key, digest_size=DIGEST_BYTES).digest()

    def digest(self, block: int) -> Digest:
        return self._digests[block]

    def add(self, block: int, parent: Digest, token_ids: Iterable[int]) -> int:
        """The block that is known for this prefix: another one where it is known already."""
        digest = self._next(parent, token_ids)
        known = self._blocks.setdefault(digest, block)
        if known == block:
            self._digests[block] = digest
        return known

    def remove(self, block: int) -> None:
        """Forgets what the block holds. What follows it in a chain is not found any more."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._blocks[digest]

    def _next(self, parent: Digest, token_ids: Iterable[int]) -> Digest:
        content = parent + array("q", token_ids).tobytes()
        return blake2b(content, key=self._key, digest_size=DIGEST_BYTES).digest()
