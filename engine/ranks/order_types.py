"""The messages of rank 0 to the other ranks: the launch, then one order after the other."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Literal

import msgspec

from core.configuration.options import Options
from core.configuration.step_size import StepSize
from core.errors import (
    ConfigurationError,
    EngineUnavailableError,
    InsufficientMemoryError,
    LongshoreError,
)
from core.foreign_code import reason_of
from core.plan import BlockMoves

LAUNCH = "launch"
"""The key of the launch in the store."""
READY = "ready"
"""The key of the number of ranks that are about to join the group."""


class _Versioned(msgspec.Struct, frozen=True):
    """The part of a launch that every version understands."""

    version: str


class RankLaunch(msgspec.Struct, frozen=True):
    """What rank 0 tells all other ranks before they load the model."""

    version: str
    """The version of Longshore."""
    model_digest: str
    """The digest by `engine.digest`, for ranks on other nodes; '' if there are none."""
    options: Options
    size: int

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, message: bytes) -> RankLaunch:
        """Decode a launch. Raises ConfigurationError if rank 0 runs another Longshore version."""
        own_version = version("longshore")
        try:
            their_version = msgspec.json.decode(message, type=_Versioned).version
            if their_version == own_version:
                return msgspec.json.decode(message, type=cls)
        except msgspec.MsgspecError as error:
            their_version = f"of another build ({error})"
        raise ConfigurationError(
            f"rank 0 runs Longshore {their_version}, but this rank runs {own_version}; install the "
            "same version on every node"
        )


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base class of the orders to a rank."""


class Move(Order, frozen=True):
    """Move KV blocks."""

    moves: BlockMoves


class Repeated(msgspec.Struct, frozen=True, array_like=True):
    """A column to repeat, whose tensors rank 0 broadcasts."""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """The dtype, by torch's name, and the shape of each."""
    numbers: tuple[tuple[int, ...], ...]


class Forward(Order, frozen=True):
    """Run a forward pass on the inputs that rank 0 broadcasts next. The fields are their sizes."""

    num_tokens: int
    num_groups: int
    """Cache groups, each with slots and block tables."""
    num_rows: int
    """Tokens whose logits are needed."""
    num_sequences: int
    num_blocks: int
    """Entries of each block table."""
    num_starts: int
    """Length of `PagedBatch.query_starts`."""
    num_decodes: int
    per_token: tuple[str, ...]
    """The names of the columns that have a number for each token, in the order of the inputs."""
    graph: StepSize | None
    """The size whose CUDA graph to replay; None: launch the kernels."""
    spans: tuple[tuple[int, int, int], ...] | None
    """`PagedBatch.spans` of the inputs."""
    repeated: tuple[Repeated, ...] = ()


class Change(Order, frozen=True):
    """Change the weights of a feature."""

    index: int
    """Among the features with weights, which all ranks have in the same order."""
    change: bytes
    """The argument of `SharedFeature.carry_out`."""


AnyOrder = Move | Forward | Change


class FailureReport(msgspec.Struct, frozen=True):
    """The reason why a rank ends, sent to rank 0."""

    kind: Literal["configuration", "memory", "failed"]
    reason: str

    @classmethod
    def of(cls, error: Exception) -> FailureReport:
        match error:
            case InsufficientMemoryError():
                return cls("memory", str(error))
            case ConfigurationError():
                return cls("configuration", str(error))
        return cls("failed", reason_of(error))

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    def error(self, rank: int) -> LongshoreError:
        """Return the error that rank 0 raises. rank: the number of the rank that ends."""
        return _ERRORS[self.kind](f"rank {rank}: {self.reason}")

    @staticmethod
    def decode_error(report: bytes, rank: int) -> LongshoreError:
        """Return the error that an encoded report stands for."""
        try:
            return msgspec.json.decode(report, type=FailureReport).error(rank)
        except msgspec.MsgspecError as error:
            return ConfigurationError(
                f"rank {rank} runs another version of Longshore ({error}); install the "
                "same version on every node"
            )


_ERRORS: Mapping[str, type[LongshoreError]] = {
    "configuration": ConfigurationError,
    "memory": InsufficientMemoryError,
    "failed": EngineUnavailableError,
}
"""The class of the error for each `FailureReport.kind`."""
