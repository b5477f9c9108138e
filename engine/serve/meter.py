"""Counts and times what requests go through, as the step loop sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from core.plan import Output
from core.stats import Stats, Timing
from engine.engine import Engine
from engine.tasks.engine import TaskEngine, TaskOutput
from engine.tasks.performer import Answer


@dataclass(slots=True)
class Course:
    """How far one request has got."""

    arrived: float
    num_prompt_tokens: int
    first_token: float | None = None
    last_tokens: dict[int, float] = field(default_factory=dict[int, float])
    """When each of its answers had its newest."""


class Meter:
    """Owned by the loop. Times are seconds of its clock."""

    def __init__(self) -> None:
        self._sums = Stats()

    def take(self, course: Course, output: Output, now: float) -> Timing | None:
        """Counts what a client is told now; the timing of an answer that ends with it."""
        count = len(output.token_ids)
        if count:
            self._take_tokens(course, output, count, now)
        if output.finish is None:
            return None
        ended = self._sums.finished
        ended[output.finish] = ended.get(output.finish, 0) + 1
        if output.admitted is None or course.first_token is None:
            return None
        self._sums.decode.add(now - course.first_token)
        self._sums.whole.add(now - course.arrived)
        return Timing(course.arrived, output.admitted, course.first_token, now)

    def take_task(self, course: Course, output: TaskOutput, now: float) -> None:
        """Counts a job that has ended, which has no tokens."""
        reason = "done" if isinstance(output.outcome, Answer) else "error"
        self._sums.finished[reason] = self._sums.finished.get(reason, 0) + 1
        self._sums.whole.add(now - course.arrived)
        if output.admitted is not None:
            self._sums.queue.add(output.admitted - course.arrived)

    def snapshot(self, engine: Engine | TaskEngine) -> Stats:
        """All figures as they are now, in an object that does not change any more."""
        strategy = engine.strategy
        return msgspec.structs.replace(
            # One that another thread may encode while this one goes on counting.
            msgspec.convert(msgspec.to_builtins(self._sums), Stats),
            num_running=strategy.num_running,
            num_waiting=len(strategy.waiting),
            num_held_blocks=strategy.memory.num_held_blocks,
            num_filled_tokens=strategy.num_filled_tokens,
            num_steps=engine.num_steps,
            num_step_sequences=engine.num_step_sequences,
            num_step_tokens=engine.num_step_tokens,
            num_prefix_queries=strategy.num_prompt_tokens,
            num_prefix_hits=strategy.num_cached_tokens,
            num_swaps=strategy.num_swaps,
            num_recomputes=strategy.num_preemptions - strategy.num_swaps,
        )

    def _take_tokens(self, course: Course, output: Output, count: int, now: float) -> None:
        self._sums.num_generated_tokens += count
        if course.first_token is None:
            course.first_token = now
            self._sums.num_prompt_tokens += course.num_prompt_tokens
            self._sums.first_token.add(now - course.arrived)
            if output.admitted is not None:
                self._sums.queue.add(output.admitted - course.arrived)
                self._sums.prefill.add(now - output.admitted)
        before = course.last_tokens.get(output.index)
        if before is not None:
            self._sums.inter_token.add((now - before) / count, count)
        course.last_tokens[output.index] = now
