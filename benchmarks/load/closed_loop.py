"""Clients in a closed loop around an in-process engine, without sockets or text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice

from benchmarks.load.journal import Journal, RequestRecord
from benchmarks.load.workload import WorkloadRequest
from core.output import Output
from core.sampling import Finish, SamplingParams
from engine.engine import Engine

STATIC = ("none", "dynamic")
"""Strategies that start a batch only when the previous one has finished."""


class ClosedLoop:
    """A number of clients that each send their next request once the previous one has finished.

    The outputs that a step returns may belong to any earlier step, so an engine with overlapped
    scheduling works too.
    """

    def __init__(
        self,
        engine: Engine,
        clients: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = engine
        self._clients = clients
        self._clock = clock
        self._sleep = sleep
        self._records: dict[int, RequestRecord] = {}

    def run(self, requests: Iterable[WorkloadRequest], seconds: float = float("inf")) -> Journal:
        """Serve requests until all have finished or time is up, and abort the unfinished ones.

        A batch of a static strategy runs to its end, even when time is up. Its short requests
        finish first, so the throughput of a part of a batch would be too high. Raises RuntimeError
        if a request fails.
        """
        stream, begin = iter(requests), self._clock()
        journal = Journal(begin, begin, pool=self._engine.strategy.memory.num_slots)
        num_preempted = self._num_preempted()
        for request in islice(stream, self._clients):
            self._submit(request, journal)
        while self._engine.has_work() and not self._is_over(begin + seconds):
            outputs = self._engine.step(self._clock())
            journal.end = self._clock()
            for output in outputs:
                if self._add_output(output, journal.end):
                    for request in islice(stream, 1):
                        self._submit(request, journal)
            if outputs or not self._sleep_if_waiting():
                self._sample_memory(journal)
        journal.num_preemptions = self._num_preempted() - num_preempted
        self._abort_all()
        return journal

    def _submit(self, request: WorkloadRequest, journal: Journal) -> None:
        now = self._clock()
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        record = RequestRecord(request, now)
        self._records[self._engine.add(request.prompt, params, now)] = record
        journal.records.append(record)

    def _add_output(self, output: Output, now: float) -> bool:
        """Record an output; return whether its request has finished."""
        if output.finish == Finish.ERROR:
            raise RuntimeError(f"a request failed: {output.failure}")
        self._records[output.request_id].add_tokens(now, len(output.token_ids))
        if output.finish is not None:
            del self._records[output.request_id]
        return output.finish is not None

    def _is_over(self, end: float) -> bool:
        if self._clock() < end:
            return False
        has_begun = any(record.arrivals for record in self._records.values())
        return not (has_begun and self._engine.facts.batching in STATIC)

    def _sleep_if_waiting(self) -> bool:
        """Sleep while the strategy waits for a batch to fill. Return whether it slept."""
        wake_at = self._engine.strategy.wake_at()
        if wake_at is None:
            return False
        self._sleep(max(0.0, wake_at - self._clock()))
        return True

    def _sample_memory(self, journal: Journal) -> None:
        memory, filled = self._engine.strategy.memory, 0
        for sequence_id, record in self._records.items():
            num_slots = len(memory.held(sequence_id)) * memory.block_size
            # The newest token's K and V are written by the next step.
            num_tokens = len(record.request.prompt) + max(0, record.num_tokens - 1)
            filled += min(num_slots, num_tokens)
        journal.held.append(memory.num_held_blocks * memory.block_size)
        journal.filled.append(filled)

    def _num_preempted(self) -> int:
        """Return the preemptions so far; only `paged` preempts."""
        return getattr(self._engine.strategy, "num_preemptions", 0)

    def _abort_all(self) -> None:
        for sequence_id in self._records:
            self._engine.abort(sequence_id)
        self._records.clear()
        while self._engine.has_work():  # a step may still be in flight
            self._engine.step(self._clock())
