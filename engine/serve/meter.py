"""Counts and times requests for the statistics in heartbeats and `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from core.output import Output
from core.stats import Stats, Timing
from engine.engine import Engine
from engine.tasks.engine import TaskEngine, TaskOutput
from engine.tasks.performer import Answer


@dataclass(slots=True)
class RequestProgress:
    """Times of one request so far, in seconds of the loop's clock."""

    arrived: float
    num_prompt_tokens: int
    first_token: float | None = None
    last_tokens: dict[int, float] = field(default_factory=dict[int, float])
    """When each answer, by its index, got its newest token."""


class Meter:
    """Collects statistics. Used by the server's loop only."""

    def __init__(self) -> None:
        self._sums = Stats()

    def record(self, progress: RequestProgress, output: Output, now: float) -> Timing | None:
        """Count an output sent now. Return the timing of an answer that ends with it."""
        count = len(output.token_ids)
        if count:
            self._record_tokens(progress, output, count, now)
        if output.finish is None:
            return None
        ended = self._sums.finished
        ended[output.finish] = ended.get(output.finish, 0) + 1
        if output.admitted is None or progress.first_token is None:
            return None
        self._sums.decode.add(now - progress.first_token)
        self._sums.whole.add(now - progress.arrived)
        return Timing(progress.arrived, output.admitted, progress.first_token, now)

    def record_task(self, progress: RequestProgress, output: TaskOutput, now: float) -> None:
        """Count a job that has ended. Jobs have no tokens."""
        reason = "done" if isinstance(output.outcome, Answer) else "error"
        self._sums.finished[reason] = self._sums.finished.get(reason, 0) + 1
        self._sums.whole.add(now - progress.arrived)
        if output.admitted is not None:
            self._sums.queue.add(output.admitted - progress.arrived)

    def snapshot(self, engine: Engine | TaskEngine) -> Stats:
        """Return all statistics as of now, in an object that no longer changes."""
        strategy = engine.strategy
        return msgspec.structs.replace(
            # A deep copy: the socket's thread may encode it while this one goes on counting.
            msgspec.convert(msgspec.to_builtins(self._sums), Stats),
            num_running=strategy.num_running,
            num_waiting=len(strategy.waiting),
            num_held_blocks=strategy.memory.num_held_blocks,
            num_filled_tokens=strategy.num_filled_tokens,
            num_steps=engine.num_steps,
            num_step_sequences=engine.num_step_sequences,
            num_step_tokens=engine.num_step_tokens,
            num_prefix_queries=strategy.num_prefix_queries,
            num_prefix_hits=strategy.num_prefix_hits,
            num_swaps=strategy.num_swaps,
            num_recomputes=strategy.num_preemptions - strategy.num_swaps,
        )

    def _record_tokens(
        self, progress: RequestProgress, output: Output, count: int, now: float
    ) -> None:
        self._sums.num_generated_tokens += count
        if progress.first_token is None:
            progress.first_token = now
            self._sums.num_prompt_tokens += progress.num_prompt_tokens
            self._sums.first_token.add(now - progress.arrived)
            if output.admitted is not None:
                self._sums.queue.add(output.admitted - progress.arrived)
                self._sums.prefill.add(now - output.admitted)
        before = progress.last_tokens.get(output.index)
        if before is not None:
            self._sums.inter_token.add((now - before) / count, count)
        progress.last_tokens[output.index] = now
