"""Counts and times requests for the statistics in heartbeats and `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from core.output import Output
from core.part import Part
from core.protocol.messages import AbortReason, NewRequest, Submit
from core.protocol.stats import Info, Stats, Timing
from core.sampling import Finish
from engine.serve.service import Result, StepEngine
from strategies.group import SequenceGroup

WORKER_LOST = "worker_lost"
"""The reason for aborting the requests of a worker process that has ended."""


@dataclass(slots=True)
class RequestProgress:
    """The facts about a request that the statistics need. Times are seconds of the loop's clock."""

    arrived: float
    num_prompt_tokens: int = 0
    num_answers: int = 1
    max_tokens: int = 0
    admitted: float | None = None
    first_token: float | None = None
    last_tokens: dict[int, float] = field(default_factory=dict[int, float])
    """When each answer, by its index, got its newest token."""
    num_tokens: dict[int, int] = field(default_factory=dict[int, int])
    """Generated tokens of each answer, by its index."""
    num_ended: int = 0
    """Answers that ended by themselves, or that a worker aborted at a stop string."""

    @classmethod
    def of(cls, message: NewRequest, arrival: float) -> RequestProgress:
        if not isinstance(message, Submit):
            return cls(arrival)
        params = message.params
        num_prompt_tokens = len(message.prompt_token_ids)
        return cls(arrival, num_prompt_tokens, params.num_answers, params.max_tokens)


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
        _count(self._sums.finished, output.finish.public_name)
        if output.finish == Finish.ERROR:
            return None
        return self._record_end(progress, output.index, now)

    def record_abort(
        self,
        progress: RequestProgress,
        answers: Iterable[int],
        reason: AbortReason | str,
        now: float,
    ) -> dict[int, Timing]:
        """Count answers that a worker has aborted. At a stop string, they count as finished.

        Return the timings of the finished answers by index.
        """
        is_finished = reason == "stop_string"
        if not is_finished:
            _count(self._sums.aborted, reason)
        timings: dict[int, Timing] = {}
        for index in answers:
            _count(self._sums.finished, "stop" if is_finished else "abort")
            timing = self._record_end(progress, index, now) if is_finished else None
            if timing is not None:
                timings[index] = timing
        return timings

    def record_refusals(self, counts: Mapping[str, int]) -> None:
        """Count HTTP requests that a worker has refused."""
        for reason, count in counts.items():
            _count(self._sums.refused, reason, count)

    def record_step(self, num_tokens: int) -> None:
        """Count a step that computed this many tokens."""
        self._sums.iteration_tokens.add(num_tokens)

    def record_result(self, progress: RequestProgress, result: Result, now: float) -> None:
        """Count a request without tokens that has ended."""
        _count(self._sums.finished, "error" if result.has_failed else "stop")
        self._sums.end_to_end.add(now - progress.arrived)
        if result.admitted is not None:
            self._sums.queue.add(result.admitted - progress.arrived)
            self._sums.inference.add(now - result.admitted)

    def snapshot(self, engine: StepEngine, host_s: float = 0.0) -> Stats:
        """Return all statistics as of now, in an object that no longer changes.

        host_s: the seconds of `HostTime`.
        """
        strategy = engine.strategy
        return msgspec.structs.replace(
            # A deep copy: the socket's thread may encode it while this thread goes on counting.
            msgspec.convert(msgspec.to_builtins(self._sums), Stats),
            num_running=strategy.num_running,
            num_waiting=len(strategy.waiting),
            waiting={strategy.blocked_by: len(strategy.waiting)},
            infos=_infos(engine),
            totals=tuple(total for feature in engine.features for total in feature.totals()),
            num_held_blocks=strategy.memory.num_held_blocks,
            num_filled_tokens=strategy.num_filled_tokens,
            num_steps=engine.num_steps,
            num_step_sequences=engine.num_step_sequences,
            host_s=host_s,
            num_prefix_queries=strategy.num_prefix_queries,
            num_prefix_hits=strategy.num_prefix_hits,
            num_swaps=strategy.num_swaps,
            num_recomputes=strategy.num_preemptions - strategy.num_swaps,
        )

    def _record_tokens(
        self, progress: RequestProgress, output: Output, count: int, now: float
    ) -> None:
        index, sums = output.index, self._sums
        sums.num_generated_tokens += count
        progress.num_tokens[index] = progress.num_tokens.get(index, 0) + count
        if progress.first_token is None:
            progress.first_token, progress.admitted = now, output.admitted
            sums.num_prompt_tokens += progress.num_prompt_tokens
            sums.first_token.add(now - progress.arrived)
            if output.admitted is not None:
                sums.queue.add(output.admitted - progress.arrived)
                sums.prefill.add(now - output.admitted)
        before = progress.last_tokens.get(index)
        if before is not None:
            sums.inter_token.add((now - before) / count, count)
        progress.last_tokens[index] = now

    def _record_end(self, progress: RequestProgress, index: int, now: float) -> Timing | None:
        """Time an answer that has ended; None if it never started."""
        progress.num_ended += 1
        if progress.admitted is None or progress.first_token is None:
            return None
        sums, num_tokens = self._sums, progress.num_tokens.get(index, 0)
        decode = now - progress.first_token
        sums.decode.add(decode)
        sums.inference.add(now - progress.admitted)
        sums.end_to_end.add(now - progress.arrived)
        sums.per_output_token.add(decode / (num_tokens - 1) if num_tokens > 1 else 0.0)
        sums.prompt_tokens.add(progress.num_prompt_tokens)
        sums.generation_tokens.add(num_tokens)
        if progress.num_ended == progress.num_answers:
            sums.max_generation_tokens.add(max(progress.num_tokens.values()))
            sums.params_n.add(progress.num_answers)
            sums.params_max_tokens.add(progress.max_tokens)
        return Timing(progress.arrived, progress.admitted, progress.first_token, now)


def _infos(engine: StepEngine) -> tuple[Info, ...]:
    """Return what the engine's features show of the requests."""
    running, waiting = map(_parts_of, (engine.strategy.running, engine.strategy.waiting))
    found = (feature.info(running, waiting) for feature in engine.features)
    return tuple(info for info in found if info is not None)


def _parts_of(groups: Iterable[SequenceGroup]) -> list[Part]:
    return [part for group in groups for part in group.request.parts]


def _count(counts: dict[str, int], key: str, count: int = 1) -> None:
    counts[key] = counts.get(key, 0) + count
