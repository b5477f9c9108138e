"""Computes what would have happened: other options, another load, the same strategies."""

from __future__ import annotations

import math
from collections import deque

from benchmarks.replay.cost import Cost, work_of
from benchmarks.replay.figures import Figures, Tally
from benchmarks.replay.reproduce import make_engine, submit
from benchmarks.replay.script import Script
from core.errors import LongshoreError
from core.sampling import Finish
from engine.observers.frames import Aborted, Arrived, Header
from strategies.factory import StrategySettings

STOP_STRING = "stop_string"


def forecast(
    header: Header, settings: StrategySettings, script: Script, cost: Cost
) -> tuple[Figures | None, int]:
    """Serve the requests of a script on a computed clock. Return figures, and refused requests.

    An answer has the tokens of the recording, and a client leaves when it did, if the answer has
    not ended by then. Raises ValueError if a sequence of the greatest length does not fit.
    """
    return _Forecast(header, settings, script, cost).run()


class _Forecast:
    def __init__(
        self, header: Header, settings: StrategySettings, script: Script, cost: Cost
    ) -> None:
        needed = settings.layout.blocks_for(settings.max_model_len)
        if needed > settings.num_blocks:
            raise ValueError(
                f"a sequence of {settings.max_model_len} tokens needs {needed} blocks, but there "
                f"are {settings.num_blocks}; lower option.max_model_len"
            )
        script.end_as_recorded()
        self._script, self._cost = script, cost
        self._engine, self._executor = make_engine(header, settings, script, repeats=False)
        self._tally = Tally(script.arrivals)
        leave = [abort for abort in script.aborts if abort.reason != STOP_STRING]
        events: list[tuple[float, Arrived | Aborted]] = [
            (each.at, each) for each in script.arrivals
        ]
        events += ((abort.at_ns / 1e9, abort) for abort in leave)
        self._events = deque(sorted(events, key=lambda event: event[0]))
        self._num_refused = 0

    def run(self) -> tuple[Figures | None, int]:
        engine, tally, now = self._engine, self._tally, 0.0
        while self._events or engine.has_work():
            if not engine.has_work():
                now = max(now, self._events[0][0])
            while self._events and self._events[0][0] <= now:
                self._apply(self._events.popleft()[1])
            if engine.has_work():
                now = self._step(now)
        tally.num_preemptions = engine.strategy.num_preemptions
        tally.num_steps, tally.num_step_sequences = engine.num_steps, engine.num_step_sequences
        return tally.figures(), self._num_refused

    def _step(self, now: float) -> float:
        """Run a step and return when it ends."""
        outputs = self._engine.step(now)
        plan = self._executor.take_plan()
        if plan is not None:
            rows = ((chunk.sequence.id, chunk.start, chunk.length) for chunk in plan.chunks)
            now += self._cost.seconds(work_of(rows))
        elif not outputs:
            now = self._wait(now)
        for output in outputs:
            if output.token_ids and output.finish is not Finish.ERROR:
                self._tally.add(output.request_id + output.index, now, len(output.token_ids))
        return now

    def _wait(self, now: float) -> float:
        """Return when something may happen, as nothing can be scheduled now."""
        wake_at = self._engine.wake_at()
        next_event = self._events[0][0] if self._events else math.inf
        until = min(math.inf if wake_at is None else wake_at, next_event)
        if until == math.inf:
            raise RuntimeError("waiting requests can never be scheduled")
        return max(until, math.nextafter(now, math.inf))

    def _apply(self, event: Arrived | Aborted) -> None:
        if isinstance(event, Aborted):
            self._engine.abort(event.id, event.index, event.reason)
            return
        self._engine.next_id = event.id  # its script is known by this id
        try:
            submit(self._engine, self._script, event, event.at)
        except LongshoreError:  # such as a request too long for these options
            self._num_refused += 1
