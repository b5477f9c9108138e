"""Moves whole blocks of KV memory, as a plan asks before its forward pass."""

from __future__ import annotations

import numpy as np

from core.errors import ConfigurationError
from core.plan import BlockMoves
from engine.attention_backend import AttentionBackend
from engine.kv_cache import KVCache
from engine.staging import Staging
from kernels.cache_table import cache_table


class BlockMover:
    """Launches the moves in the order of BlockMoves; waits for none of them."""

    def __init__(self, cache: KVCache, backend: AttentionBackend, staging: Staging) -> None:
        """Raises ConfigurationError where the blocks of this model and size cannot be moved."""
        try:
            self._table = cache_table([*cache.keys, *cache.values])
        except ValueError as error:
            raise ConfigurationError(
                f"option.block_size={cache.block_size}: {error}; 16 would do"
            ) from error
        self._backend = backend
        self._staging = staging

    def launch(self, moves: BlockMoves) -> None:
        if moves.copies:
            [pairs] = self._staging.upload([np.array(moves.copies, np.int64)])
            self._backend.copy_blocks(self._table, pairs)
