"""Computes what would have happened: other options, another load, the same strategies."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import msgspec

from benchmarks.replay.cost import Cost, work_of
from benchmarks.replay.figures import Figures, Tally
from benchmarks.replay.reproduce import make_engine, submit
from benchmarks.replay.script import Script
from benchmarks.replay.takeover import has_same_memory, take_over
from core.errors import LongshoreError
from core.plan import StepPlan
from core.sampling import Finish
from engine.engine import Engine
from engine.executor import Observer
from engine.observers.frames import Aborted, Arrived, Header
from engine.observers.ledger import joined
from strategies.base import Strategy
from strategies.factory import StrategySettings

STOP_STRING = "stop_string"
ROUNDING_S = 1e-8
"""Recorded times are integer nanoseconds, and computed ones are sums of floats."""
Watch = Callable[[Strategy, Callable[[], int]], Iterable[Observer]]


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a schedule begins, if there are requests and memory before it."""

    engine: Engine
    """With the recorded options. It is of no use afterwards."""
    now: float
    newest: Mapping[int, float]
    """By sequence id: when the sequence got its newest token."""


def check_computable(header: Header) -> None:
    """Raise ValueError if no other schedule than the recorded one can be computed."""
    if header.executor == "library":
        raise ValueError(
            "a step of the library executor computes whole answers, so the time of another "
            "schedule cannot be computed; leave the options out to reproduce the recorded one"
        )
    if header.drafts:
        raise ValueError(
            "which drafts of option.speculative_method another schedule would verify is unknown; "
            "leave the options out to reproduce the recorded one"
        )


def forecast(
    header: Header, settings: StrategySettings, script: Script, cost: Cost
) -> tuple[Figures | None, int]:
    """Serve the requests of a script on a computed clock. Return figures, and refused requests.

    An answer has the tokens of the recording, and a client leaves as long after its request as it
    did, if the answer has not ended by then. Raises ValueError if a sequence of the greatest length
    does not fit.
    """
    tally, num_refused = serve(header, settings, script, cost)
    return tally.figures(), num_refused


def serve(
    header: Header,
    settings: StrategySettings,
    script: Script,
    cost: Cost,
    num_users: int | None = None,
    watch: Watch = lambda strategy, clock_ns: (),
    beginning: Beginning | None = None,
) -> tuple[Tally, int]:
    """Do as `forecast` does. Return what the answers got, and refused requests.

    num_users: if given, requests do not arrive when they did: so many users each send the next one
    when they have an answer. watch: returns observers of the engine. They get its strategy, and the
    computed clock: the begin of a step until it is scheduled, then its end. beginning: requests
    that it has must be in the script; the memory stays if the settings have the same one.
    """
    return _Forecast(header, settings, script, cost, num_users, watch, beginning).run()


class _Forecast:
    def __init__(
        self,
        header: Header,
        settings: StrategySettings,
        script: Script,
        cost: Cost,
        num_users: int | None,
        watch: Watch,
        beginning: Beginning | None,
    ) -> None:
        needed = settings.layout.blocks_for(settings.max_model_len)
        if needed > settings.num_blocks:
            raise ValueError(
                f"a sequence of {settings.max_model_len} tokens needs {needed} blocks, but there "
                f"are {settings.num_blocks}; lower option.max_model_len"
            )
        script.end_as_recorded()
        self._script, self._cost = script, cost
        memory = None
        if beginning is not None and has_same_memory(header.settings, settings):
            memory = beginning.engine.strategy.memory
        self._engine, self._executor = make_engine(
            header, settings, script, repeats=False, memory=memory
        )
        self._num_refused, self._now = 0, 0.0
        self._tally, self._events = Tally(script.arrivals), _Events(script)
        if beginning is not None:
            self._events = _Events(script, beginning.engine.strategy.request_ids)
            self._tally = Tally(script.arrivals, beginning.now, beginning.newest)
            self._num_refused = take_over(self._engine, beginning.engine)
            self._now = beginning.now
        strategy = self._engine.strategy
        watchers = watch(strategy, lambda: round(self._now * 1e9))
        self._engine.observer = joined((_Extremes(strategy, self._tally), *watchers))
        self._later: deque[Arrived] = deque()
        """Requests that wait for a user."""
        self._num_open: dict[int, int] = {}
        """With users: the answers of each request that have not ended."""
        if num_users is not None:
            self._later = self._events.hold_back(num_users)

    def run(self) -> tuple[Tally, int]:
        engine, tally, now = self._engine, self._tally, self._now
        while self._events or engine.has_work():
            if not engine.has_work():
                now = max(now, self._events.next_at)
            self._now = now
            for event in self._events.until(now):
                self._apply(event, now)
            if engine.has_work():
                now = self._step(now)
        tally.num_preemptions = engine.strategy.num_preemptions
        tally.num_steps, tally.num_step_sequences = engine.num_steps, engine.num_step_sequences
        return tally, self._num_refused

    def _step(self, now: float) -> float:
        """Run a step and return when it ends."""
        num_steps, in_flight = self._engine.num_steps, self._engine.in_flight
        outputs = self._engine.step(now, self._compute)
        if self._engine.num_steps == num_steps and in_flight is None and not outputs:
            self._now = self._wait(now)
        now = self._now
        for output in outputs:
            if output.token_ids and output.finish is not Finish.ERROR:
                self._tally.add(output.request_id + output.index, now, len(output.token_ids))
            if output.finish is not None:
                self._end_answer(output.request_id, now)
        return now

    def _compute(self) -> None:
        """Let the time of the submitted step pass."""
        plan = self._executor.take_plan()
        if plan is not None:
            rows = ((chunk.sequence.id, chunk.start, chunk.length) for chunk in plan.chunks)
            self._now += self._cost.seconds(work_of(rows))

    def _wait(self, now: float) -> float:
        """Return when something may happen, as nothing can be scheduled now."""
        wake_at = self._engine.wake_at()
        until = min(math.inf if wake_at is None else wake_at, self._events.next_at)
        if until == math.inf:
            raise RuntimeError("waiting requests can never be scheduled")
        return max(until, math.nextafter(now, math.inf))

    def _apply(self, event: Arrived | Aborted, now: float) -> None:
        if isinstance(event, Aborted):
            self._engine.abort(event.id, event.index, event.reason)
            self._end_answer(event.id, now, whole=event.index is None)
            return
        self._engine.next_id = event.id  # its script is known by this id
        self._num_open[event.id] = event.num_answers
        try:
            submit(self._engine, self._script, event, event.at)
        except LongshoreError:  # such as a request too long for these options
            self._num_refused += 1
            self._end_answer(event.id, now, whole=True)

    def _end_answer(self, request_id: int, now: float, *, whole: bool = False) -> None:
        """Let the user of a request whose answers have all ended send the next one."""
        num_open = self._num_open.get(request_id)
        if num_open is None:
            return
        if num_open > 1 and not whole:
            self._num_open[request_id] = num_open - 1
            return
        del self._num_open[request_id]
        if self._later:
            arrived = self._events.send(self._later.popleft(), now)
            self._tally.arrived(arrived.id, now, arrived.num_samples)


class _Events:
    """The arrivals that are still to come, and the clients that will leave, by time."""

    def __init__(self, script: Script, arrived: Collection[int] = ()) -> None:
        """arrived: requests that have arrived already. Their clients may still leave."""
        self._order = count()
        self._leave: dict[int, list[tuple[float, Aborted]]] = {}
        """By request: how long after its arrival."""
        times = {each.id: each.at for each in script.arrivals}
        for abort in script.aborts:
            if abort.reason != STOP_STRING and abort.id in times:
                after = abort.at_ns / 1e9 - times[abort.id]
                self._leave.setdefault(abort.id, []).append((after, abort))
        self._heap: list[tuple[float, int, Arrived | Aborted]] = []
        for each in script.arrivals:
            if each.id not in arrived:
                self._push(each.at, each)
            else:
                self._push_leaving(each.at, each.id)

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def next_at(self) -> float:
        """When the next one happens; infinity without any."""
        return self._heap[0][0] if self._heap else math.inf

    def hold_back(self, num_sent: int) -> deque[Arrived]:
        """Keep the first arrivals, and return the others."""
        arrivals = [event for _, _, event in sorted(self._heap) if isinstance(event, Arrived)]
        self._heap.clear()
        for each in arrivals[:num_sent]:
            self._push(each.at, each)
        return deque(arrivals[num_sent:])

    def send(self, arrived: Arrived, at: float) -> Arrived:
        """Let a request that was held back arrive, and return it with that time."""
        sent = msgspec.structs.replace(arrived, at=at)
        self._push(at, sent)
        return sent

    def until(self, now: float) -> Iterator[Arrived | Aborted]:
        """Yield and remove what happens up to now."""
        while self._heap and self._heap[0][0] <= now + ROUNDING_S:
            yield heapq.heappop(self._heap)[2]

    def _push(self, at: float, arrived: Arrived) -> None:
        heapq.heappush(self._heap, (at, next(self._order), arrived))
        self._push_leaving(at, arrived.id)

    def _push_leaving(self, at: float, request_id: int) -> None:
        """Let the clients of a request, which arrives `at`, leave as long after it as they did."""
        for after, abort in self._leave.get(request_id, ()):
            heapq.heappush(self._heap, (at + after, next(self._order), abort))


class _Extremes(Observer):
    """Notes the largest step, and the most blocks."""

    def __init__(self, strategy: Strategy, tally: Tally) -> None:
        self._strategy = strategy
        self._tally = tally

    def scheduled(self, plan: StepPlan | None) -> None:
        if plan is not None:
            tally, memory = self._tally, self._strategy.memory
            tally.most_sequences = max(tally.most_sequences, len(plan.chunks))
            tally.most_blocks = max(tally.most_blocks, memory.num_held_blocks)
