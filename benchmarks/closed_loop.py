"""Clients around an engine in this process, on the real clock: no sockets, no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice

from benchmarks.journal import Flight, Journal
from benchmarks.workload import Request
from core.plan import Output
from core.sampling import Finish, SamplingParams
from engine.engine import Engine

GANGS = ("none", "dynamic")
"""Strategies whose next batch starts when the one before it has ended."""


class ClosedLoop:
    """So many clients, each of which sends its next request once it has its answer.

    Nothing is assumed of which step an output comes from.
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
        self._flights: dict[int, Flight] = {}

    def run(self, requests: Iterable[Request], seconds: float = float("inf")) -> Journal:
        """Until all are answered or time is up; what is under way then is withdrawn.

        A gang is let go to its end: its short answers come first, so half of one would count for
        more than it is. Raises RuntimeError where a request fails.
        """
        stream, begin = iter(requests), self._clock()
        journal = Journal(begin, begin, pool=self._engine.strategy.memory.num_tokens)
        num_preempted = self._num_preempted()
        for request in islice(stream, self._clients):
            self._submit(request, journal)
        while self._engine.has_work() and not self._is_over(begin + seconds):
            outputs = self._engine.step(self._clock())
            journal.end = self._clock()
            for output in outputs:
                if self._take(output, journal.end):
                    for request in islice(stream, 1):
                        self._submit(request, journal)
            if outputs or not self._has_slept():
                self._sample_memory(journal)
        journal.num_preemptions = self._num_preempted() - num_preempted
        self._withdraw()
        return journal

    def _submit(self, request: Request, journal: Journal) -> None:
        now = self._clock()
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        flight = Flight(request, now)
        self._flights[self._engine.add(request.prompt, params, now)] = flight
        journal.flights.append(flight)

    def _take(self, output: Output, now: float) -> bool:
        """Whether the answer has ended with it."""
        if output.finish == Finish.ERROR:
            raise RuntimeError(f"a request failed: {output.failure}")
        self._flights[output.request_id].take(now, len(output.token_ids))
        if output.finish is not None:
            del self._flights[output.request_id]
        return output.finish is not None

    def _is_over(self, end: float) -> bool:
        if self._clock() < end:
            return False
        has_begun = any(flight.arrivals for flight in self._flights.values())
        return not (has_begun and self._engine.facts.batching in GANGS)

    def _has_slept(self) -> bool:
        """Sleeps until the strategy wants the next step, if it waits: a gang may be filling."""
        wake_at = self._engine.strategy.wake_at()
        if wake_at is None:
            return False
        self._sleep(max(0.0, wake_at - self._clock()))
        return True

    def _sample_memory(self, journal: Journal) -> None:
        memory, filled = self._engine.strategy.memory, 0
        for sequence_id, flight in self._flights.items():
            num_slots = len(memory.table(sequence_id)) * memory.block_size
            # The newest token's K and V come with the next step.
            num_tokens = len(flight.request.prompt) + max(0, flight.num_tokens - 1)
            filled += min(num_slots, num_tokens)
        journal.held.append(memory.num_held_blocks * memory.block_size)
        journal.filled.append(filled)

    def _num_preempted(self) -> int:
        """Only `paged` takes memory back."""
        return getattr(self._engine.strategy, "num_preemptions", 0)

    def _withdraw(self) -> None:
        for sequence_id in self._flights:
            self._engine.abort(sequence_id)
        self._flights.clear()
        while self._engine.has_work():  # a step may still be under way
            self._engine.step(self._clock())
