"""What rank 0 sends to the other ranks: their launch, then one order after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from core.errors import (
    ConfigurationError,
    EngineUnavailableError,
    InsufficientMemoryError,
    LongshoreError,
)
from core.options import Options
from core.plan import BlockMoves
from core.step_size import StepSize


class GroupAddress(msgspec.Struct, frozen=True):
    """How ranks find each other."""

    store: str
    """A file that does not exist yet, or tcp://HOST:PORT; the same for all ranks."""
    interface: str
    """The network interface of this rank's machine to the others. '': torch chooses one."""
    timeout_s: float
    """The longest that a rank waits for the others in a collective."""


class RankLaunch(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    model_dir: str
    options: Options
    rank: int
    size: int
    address: GroupAddress


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base class of what a rank is told to do."""


class Move(Order, frozen=True):
    """Move KV blocks."""

    moves: BlockMoves


class Forward(Order, frozen=True):
    """Run a forward pass on the inputs that rank 0 broadcasts next; these are their sizes."""

    num_tokens: int
    num_rows: int
    """Tokens whose logits are needed."""
    num_sequences: int
    num_blocks: int
    """Entries of each block table."""
    num_starts: int
    """Length of `PagedBatch.query_starts`."""
    num_decodes: int
    has_adapters: bool
    graph: StepSize | None
    """The size whose CUDA graph to replay; None: launch the kernels."""
    spans: tuple[tuple[int, int, int], ...] | None


class Install(Order, frozen=True):
    """Copy an adapter into a slot."""

    slot: int
    layers: Mapping[str, tuple[int, bytes, bytes]]
    """For each layer its rank, A [rank, in] and B [out, rank], in the layer's dtype."""


AnyOrder = Move | Forward | Install


class LastWords(msgspec.Struct, frozen=True):
    """Why a rank ends, for rank 0."""

    kind: Literal["configuration", "memory", "failed"]
    reason: str

    @classmethod
    def of(cls, error: Exception) -> LastWords:
        match error:
            case InsufficientMemoryError():
                return cls("memory", str(error))
            case ConfigurationError():
                return cls("configuration", str(error))
        return cls("failed", f"{type(error).__name__}: {error}")

    def error(self, rank: int) -> LongshoreError:
        """Return the error that rank 0 raises. rank: the one that ends."""
        return _ERRORS[self.kind](f"rank {rank}: {self.reason}")


_ERRORS: Mapping[str, type[LongshoreError]] = {
    "configuration": ConfigurationError,
    "memory": InsufficientMemoryError,
    "failed": EngineUnavailableError,
}
"""By `LastWords.kind`."""
