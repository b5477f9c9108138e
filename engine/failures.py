"""Decides which requests end when a step, or the strategy itself, fails.

```
a sequence cannot be sampled       its request
memory runs out in a step          the request that computes most in it
any other failure of a step        every request of the step
an exception of the strategy       the request it was working on; if that is unknown, every request
                                   that holds blocks; as a last resort, every request
```

An exception of the strategy is a bug. It may leave the bookkeeping of the request half done, so
that request is dropped and the blocks of the others are counted anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

from core.errors import GenerationError
from core.output import Output
from core.plan import StepPlan, StepResult
from core.request import Request
from core.sampling import Finish, SequenceFailure
from core.sequence import Sequence
from strategies.base import Strategy

logger = logging.getLogger(__name__)


class Guard:
    """Calls a strategy so that its exceptions end requests. Only `add` raises.

    Each request that ends here gets one Output with Finish.ERROR, which `take_outputs` returns.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._outputs: list[Output] = []

    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def take_outputs(self) -> list[Output]:
        """Return the errors since the last call. No output of their requests follows."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def add(self, request: Request) -> bool:
        """Queue a request. Returns False, and changes nothing, if it can never run.

        Raises GenerationError, and changes nothing, if the strategy fails.
        """
        with self._guarded("add", lambda: {request.id}, silent=request.id):
            return self._strategy.add(request)
        raise GenerationError("the batching strategy failed to add the request")

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Drop a request, or only its answer `index`. If that fails, drop the whole request."""
        silent = None
        if index is None:
            silent = request_id
            self._outputs = [output for output in self._outputs if output.request_id != silent]
        with self._guarded("abort", lambda: {request_id}, silent=silent):
            self._strategy.abort(request_id, index)

    def schedule(self, now: float) -> StepPlan | None:
        """Return the next step. After an exception it only has the block moves made before it."""
        with self._guarded("schedule", self._scheduled):
            return self._strategy.schedule(now)
        with self._guarded("plan", self._everyone):
            return self._strategy.plan()
        return None

    def wake_at(self) -> float | None:
        with self._guarded("wake_at", self._everyone):
            return self._strategy.wake_at()
        return None

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Commit a step group by group, so that an exception ends only that group's request."""
        outputs: list[Output] = []
        with self._guarded("commit", self._everyone):
            self._strategy.memory.states.computed(plan.chunks)
            if any(isinstance(each, SequenceFailure) for each in result.values()):
                self._fail_sequences(plan, result)
            for group, chunks in self._strategy.by_group(plan).items():
                try:
                    outputs += self._strategy.commit_group(group, chunks, result)
                except Exception as error:
                    self._drop({group.request.id}, "commit", error)
        return outputs

    def fail(self, plan: StepPlan, reason: str) -> None:
        """End every request of a plan whose step failed. Call it instead of `commit`."""
        with self._guarded("fail", self._everyone):
            self._strategy.memory.states.lose(plan.moves)
            self._end(dict.fromkeys(self._requests_of(plan), SequenceFailure(reason)))

    def fail_largest(self, plan: StepPlan, reason: str) -> None:
        """End only the request that computes most in a plan for which memory ran out.

        The tokens of the other requests become pending again, so the next plan holds them. Call
        this instead of `commit`, before the next `schedule`, for a plan that was not computed. If
        the plan moves blocks, ends all of its requests, as `fail` does, because nobody knows which
        moves have happened.
        """
        alive = [chunk for chunk in plan.chunks if chunk.sequence.finish is None]
        if plan.moves or plan.swapped_out or not alive:
            self.fail(plan, reason)
            return
        with self._guarded("rewind", self._everyone):
            self._strategy.rewind(plan)
            largest = max(alive, key=lambda chunk: (chunk.length, chunk.end))
            requests = self._strategy.requests_of([largest.sequence])
            self._end(dict.fromkeys(requests, SequenceFailure(reason)))

    def _fail_sequences(self, plan: StepPlan, result: StepResult) -> None:
        """End the requests of sequences for which no token could be sampled."""
        failures: dict[int, SequenceFailure] = {}
        for chunk in plan.chunks:
            failure = result.get(chunk.sequence.id)
            if isinstance(failure, SequenceFailure):
                requests = self._strategy.requests_of([chunk.sequence])
                failures |= dict.fromkeys(requests, failure)
        self._end(failures)

    def _requests_of(self, plan: StepPlan) -> set[int]:
        """Return the requests that a plan computes or swaps out, or whose blocks it fills."""
        sequences = [*(chunk.sequence for chunk in plan.chunks), *plan.swapped_out]
        if not plan.chunks:  # else the chunks are of the same requests
            sequences += self._holders(plan)
        return self._strategy.requests_of(sequences)

    def _holders(self, plan: StepPlan) -> Iterable[Sequence]:
        """Yield the sequences that hold a block, or a state, into which the plan moves another."""
        memory, moves = self._strategy.memory, plan.moves
        moved = {target for _, target in (*moves.swap_ins, *moves.copies)}
        states = {target for _, target in moves.state_swap_ins}
        for group in self._strategy.running:
            for sequence in group.sequences:
                held, held_states = memory.held(sequence.id), memory.states.held(sequence.id)
                if not moved.isdisjoint(held) or not states.isdisjoint(held_states):
                    yield sequence

    def _scheduled(self) -> set[int]:
        """Return the requests to which an exception of `schedule` may belong."""
        strategy = self._strategy
        if strategy.current is not None:
            return {strategy.current.request.id}
        computed = (
            sequence
            for group in (*strategy.running, *strategy.waiting)
            for sequence in group.sequences
            if group in strategy.running or sequence.num_computed_tokens > 0
        )
        return strategy.requests_of(computed) or strategy.request_ids

    def _everyone(self) -> set[int]:
        return self._strategy.request_ids

    def _end(self, failures: Mapping[int, SequenceFailure]) -> None:
        """End requests of a strategy whose bookkeeping is right."""
        for request_id, failure in failures.items():
            if request_id in self._strategy.request_ids:
                self.abort(request_id)
                self._add_output(request_id, failure)

    @contextmanager
    def _guarded(
        self, task: str, culprits: Callable[[], set[int]], silent: int | None = None
    ) -> Generator[None]:
        """Drop `culprits` if the block raises, and go on after it. `silent` gets no output."""
        try:
            yield
        except Exception as error:
            self._drop(culprits(), task, error, silent)

    def _drop(
        self, request_ids: set[int], task: str, error: Exception, silent: int | None = None
    ) -> None:
        """End requests after an exception; if even that fails, all. Call from an `except` block."""
        logger.exception("strategy failed task=%s requests=%s", task, sorted(request_ids))
        everyone = self._strategy.request_ids | request_ids
        try:
            self._strategy.discard(request_ids)
        except Exception:
            logger.exception("strategy failed to drop requests, all end")
            request_ids = everyone
            self._strategy.discard(request_ids)
        for request_id in sorted(request_ids - {silent}):
            self._add_output(request_id, SequenceFailure(f"{type(error).__name__}: {error}"))

    def _add_output(self, request_id: int, failure: SequenceFailure) -> None:
        output = Output(
            request_id, (), (), Finish.ERROR, failure=failure.reason, failed_field=failure.field
        )
        self._outputs.append(output)
