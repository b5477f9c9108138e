"""The engine's state for the live page: its sequences and its KV blocks (docs/operate.md).

Numbers only: no text, no token ids and no names of clients.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from core.protocol.stats import Timing

Phase = Literal["waiting", "prefill", "decode", "preempted", "swapped"]
"""Prefill: the answer has no token yet or, after a preemption, several tokens of prompt and answer
are pending. Decode: one token per step. Preempted and swapped sequences wait to run again."""

BlockRuns = list[tuple[int, int]]
"""Block numbers as runs of consecutive ones: the first block and the length of each run."""


class GroupSnapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Layers that share blocks; see `core.configuration.kv_layout.CacheGroup`."""

    block_size: int
    window: int | None
    num_layers: int
    """0: all layers."""


class SequenceSnapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One unfinished answer. Times are seconds of the engine's monotonic clock."""

    id: int
    request: int
    """The engine's number of the request, which all its sequences share."""
    phase: Phase
    num_prompt_tokens: int
    num_tokens: int
    """Tokens of the prompt and of the answer so far."""
    num_computed_tokens: int
    max_length: int
    """Tokens of the prompt and of the longest possible answer."""
    arrived: float
    admitted: float | None
    first_token: float | None
    tables: list[BlockRuns]
    """The blocks that it holds in each group. Sequences that share a block both list it."""
    freed: list[int]
    """How many blocks have left the window before these, in each group."""
    states: list[int] = []
    """The slots of its state, which others may share, and of those after its drafts."""


class EndedSnapshot(msgspec.Struct, frozen=True, gc=False):
    """An answer that has ended since the last snapshot."""

    id: int
    timing: Timing


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of a strategy between two steps."""

    now: float
    sequences: list[SequenceSnapshot]
    """The running sequences and the first waiting ones, in the order in which they are served."""
    ended: list[EndedSnapshot]
    num_running: int
    num_waiting: int
    """Waiting groups of sequences that run together, including groups that are not in `sequences`.
    """
    groups: list[GroupSnapshot]
    num_blocks: int
    num_held_blocks: int
    kept_blocks: BlockRuns
    """Free blocks whose content the prefix cache keeps for later prompts."""
    num_states: int = 0
    """Slots of states; 0 if the model's layers keep none."""
    kept_states: BlockRuns = []
    """Free slots with the state at the end of a cached prefix."""
