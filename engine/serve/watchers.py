"""Snapshots of the engine for the live page. They cost nothing while no page is open."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from core.plan import BlockTable
from core.protocol.messages import FromEngine, Watched
from core.protocol.snapshot import (
    BlockRuns,
    EndedSnapshot,
    GroupSnapshot,
    Phase,
    SequenceSnapshot,
    Snapshot,
)
from core.protocol.stats import Timing
from core.sequence import Sequence
from strategies.base import Strategy
from strategies.group import SequenceGroup

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 0.5
MAX_SHARE = 0.004
"""Fraction of the loop's CPU time that snapshots may take. With a large batch or a busy machine
they become rarer, but there is one every MAX_INTERVAL_S, even while the engine is idle."""
MAX_WAITING = 64
"""Maximum number of waiting groups in a snapshot."""
MAX_ENDED = 1024
"""Maximum number of ended answers in a snapshot. Older ones are left out."""

FirstToken = Callable[[int], float | None]
"""Returns when the request with this id got its first token."""


class Watchers:
    """Sends snapshots to each watching client until its time is up.

    As a condition, it is true while somebody watches.
    """

    def __init__(
        self,
        strategy: Strategy,
        send: Callable[[bytes, FromEngine], None],
        first_token: FirstToken,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """cpu_clock: seconds of CPU time of the loop's thread."""
        self._strategy = strategy
        self._send = send
        self._first_token = first_token
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._expires_at: dict[bytes, float] = {}
        self._ended: deque[EndedSnapshot] = deque(maxlen=MAX_ENDED)
        self._due = self._latest = self._cpu_due = 0.0

    def __bool__(self) -> bool:
        return bool(self._expires_at)

    def add(self, client: bytes, seconds: float) -> None:
        """Send snapshots to the client for this long from now on."""
        if not self:
            self._ended.clear()
        self._expires_at[client] = self._clock() + seconds

    def remove(self, client: bytes) -> None:
        """Forget a client that has disconnected."""
        self._expires_at.pop(client, None)

    def note_end(self, sequence_id: int, timing: Timing) -> None:
        """If anybody watches, keep an answer that has ended, for the next snapshot."""
        if self:
            self._ended.append(EndedSnapshot(sequence_id, timing))

    def update(self) -> None:
        """Send a snapshot to every client whose time is not up, if a snapshot is due."""
        now = self._clock()
        if now < self._due:
            return
        started = self._cpu_clock()
        if started < self._cpu_due and now < self._latest:
            return
        self._expires_at = {client: end for client, end in self._expires_at.items() if end > now}
        if self:
            snapshot = take_snapshot(self._strategy, self._ended, self._first_token, now)
            for client in self._expires_at:
                self._send(client, Watched(snapshot))
        self._ended.clear()
        self._due, self._latest = now + MIN_INTERVAL_S, now + MAX_INTERVAL_S
        ended = self._cpu_clock()
        self._cpu_due = ended + (ended - started) / MAX_SHARE


def take_snapshot(
    strategy: Strategy, ended: Iterable[EndedSnapshot], first_token: FirstToken, now: float
) -> Snapshot:
    """Return the state of a strategy. It refers to nothing that later steps change."""
    memory = strategy.memory
    groups = [*strategy.running, *islice(strategy.waiting, MAX_WAITING)]
    return Snapshot(
        now=now,
        sequences=[
            SequenceSnapshot(
                id=sequence.id,
                request=group.request.id,
                phase=_phase(strategy, group, sequence, is_running=index < len(strategy.running)),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_tokens=len(sequence.token_ids),
                num_computed_tokens=sequence.num_computed_tokens,
                max_length=sequence.max_length,
                arrived=group.request.arrival,
                admitted=group.request.admitted,
                first_token=first_token(group.request.id),
                tables=[_runs_of(table) for table in memory.tables(sequence.id)],
                freed=[table.first for table in memory.tables(sequence.id)],
                states=[*memory.states.held(sequence.id)],
            )
            for index, group in enumerate(groups)
            for sequence in group.sequences
        ],
        ended=list(ended),
        num_running=strategy.num_running,
        num_waiting=len(strategy.waiting),
        groups=[
            GroupSnapshot(
                block_size=group.block_size, window=group.window, num_layers=len(group.layers)
            )
            for group in memory.layout.groups
        ],
        num_blocks=memory.num_blocks,
        num_held_blocks=memory.num_held_blocks,
        kept_blocks=block_runs(sorted(memory.kept_blocks)),
        num_states=memory.states.num_slots,
        kept_states=block_runs(sorted(memory.states.kept_slots)),
    )


def block_runs(blocks: Iterable[int]) -> BlockRuns:
    """Return blocks, in their order, as runs of consecutive blocks."""
    runs: BlockRuns = []
    first = end = -1
    for block in blocks:
        if block != end:
            if end > first:
                runs.append((first, end - first))
            first = block
        end = block + 1
    return [*runs, (first, end - first)] if end > first else runs


def _runs_of(table: BlockTable) -> BlockRuns:
    """Return the blocks that are held. Without paging, a window's table repeats those of a ring."""
    return block_runs(dict.fromkeys(table.held))


def _phase(
    strategy: Strategy, group: SequenceGroup, sequence: Sequence, *, is_running: bool
) -> Phase:
    if is_running:
        is_first = sequence.num_generated_tokens == 0
        return "prefill" if is_first or sequence.num_pending_tokens > 1 else "decode"
    if strategy.memory.is_swapped(sequence.id):
        return "swapped"
    # `admitted` alone does not show that this group has run: another group of its request may have
    # set it. But as long as nothing has been preempted, no waiting group has run.
    was_running = group.request.admitted is not None and strategy.num_preemptions > 0
    return "preempted" if was_running else "waiting"
