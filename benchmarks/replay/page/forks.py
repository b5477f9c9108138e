"""Two futures of one moment: with the recorded options, and with others or without some requests.

The recording is replayed up to the moment. Both futures go on from there: with the requests that
run and wait, and with the memory, if the other options have the same kind and size of memory
(benchmarks/replay/takeover.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property

import msgspec

from benchmarks.load.journal import percentile
from benchmarks.replay.cost import FittedCost, fitted
from benchmarks.replay.forecast import Beginning, check_computable, serve
from benchmarks.replay.page.rows import Row, Rows
from benchmarks.replay.page.tape import Tape
from benchmarks.replay.script import Script, script_of
from benchmarks.replay.settings import changed
from benchmarks.replay.takeover import has_same_memory
from core.configuration.record import Value
from core.request import Request
from engine.engine import Engine
from engine.executor import Observer
from engine.observers.frames import Aborted
from strategies.base import Strategy
from strategies.factory import StrategySettings
from strategies.group import SequenceGroup


class Future(msgspec.Struct, frozen=True):
    """What happens after a moment."""

    at: float
    """When it begins: the step that ran at the moment has ended."""
    settings: StrategySettings
    figures: dict[str, float]
    """By name, in seconds or per second; without any if no request gets a token."""
    rows: list[Row]
    num_refused: int
    """Requests that do not fit with these options."""
    keeps_memory: bool
    """Whether it begins with the blocks of the moment."""
    num_preempted: int
    """Sequences that ran at the moment, and are computed again, since the memory is another."""


class Forks:
    """Computes futures of a tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    @cached_property
    def cost(self) -> FittedCost:
        return fitted(self._tape.recording.frames)

    def fork(
        self, at: float, changes: Mapping[str, Value], without: Collection[int] = ()
    ) -> tuple[Future, Future]:
        """Return the future with the recorded options, and the one with changes.

        without: requests that are left out of the second one. Then both begin before the step that
        begins at that time, and otherwise after it.

        Raises ValueError or ConfigurationError if it cannot be computed.
        """
        header = self._tape.recording.header
        check_computable(header)
        settings = changed(header.settings, changes)
        index = self._tape.step_at(at) if without else self._tape.index_at(at)
        return (
            self._future(header.settings, index, at),
            self._future(settings, index, at, without),
        )

    def beginning(
        self, index: int, at: float, without: Collection[int] = ()
    ) -> tuple[Beginning, Script]:
        """Return the state before a frame, and what the requests do that it has or that come later.

        at: the state is not older than that.
        """
        tape = self._tape
        replay = tape.to(index)
        frames, engine = tape.recording.frames, replay.engine
        now = max(tape.begin, at, replay.now_ns() / 1e9)
        newest: dict[int, float] = {}

        def note(sequence_id: int, at: float, count: int) -> None:
            newest[sequence_id] = at

        script_of(frames[: replay.index], tape.script.link_tokens, note)
        for id in without:
            engine.abort(id)
        left = [frame for frame in frames[replay.index :] if isinstance(frame, Aborted)]
        script = _script_from(tape.script, engine, left, without)
        return Beginning(engine, now, newest), script

    def _future(
        self, settings: StrategySettings, index: int, at: float, without: Collection[int] = ()
    ) -> Future:
        header = self._tape.recording.header
        beginning, script = self.beginning(index, at, without)
        now, keeps_memory = beginning.now, has_same_memory(header.settings, settings)
        num_running = beginning.engine.strategy.num_running
        open_rows = list(self._open_rows(beginning))
        rows: dict[int, Row] = {}

        def watch(strategy: Strategy, clock_ns: Callable[[], int]) -> Iterable[Observer]:
            watcher = Rows(strategy, clock_ns)
            kept = strategy.request_ids
            watcher.resume(row for row in open_rows if row[0].id in kept)
            nonlocal rows
            rows = watcher.rows
            return (watcher,)

        tally, num_refused = serve(
            header, settings, script, self.cost, watch=watch, beginning=beginning
        )
        found = tally.figures()
        figures = {} if found is None else _named(dataclasses.asdict(found))
        waits = [
            row.admitted - row.arrived
            for row in rows.values()
            if row.admitted is not None and row.admitted >= now
        ]
        if waits:
            figures |= {"wait_p50": percentile(waits, 0.5), "wait_p99": percentile(waits, 0.99)}
        num_preempted = 0 if keeps_memory else num_running
        return Future(
            now, settings, figures, list(rows.values()), num_refused, keeps_memory, num_preempted
        )

    def _open_rows(self, beginning: Beginning) -> Iterator[tuple[Request, Row]]:
        """Yield the rows of all sequences that have not ended, as they are at that moment."""
        strategy = beginning.engine.strategy
        for group in (*strategy.running, *strategy.waiting):
            for id, num_generated in _open_sequences(group).items():
                if id in self._tape.rows:
                    row = self._tape.rows[id].until(beginning.now, num_generated)
                    # Of a search, a further sequence has a row from when it first runs.
                    is_first = id == group.request.id or not group.is_indivisible
                    if is_first or row.admitted is not None:
                        yield group.request, row


def _open_sequences(group: SequenceGroup) -> dict[int, int]:
    """Return the tokens that each sequence of a group has given its client, by sequence id."""
    if group.is_indivisible:
        return dict.fromkeys(group.sequence_ids, 0)
    return {sequence.id: sequence.num_generated_tokens for sequence in group.sequences}


def _named(figures: Mapping[str, float | tuple[float, float]]) -> dict[str, float]:
    """Return each figure by its name; of two, the median and the 99th percentile.

    Those that are not known are left out.
    """
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, tuple):
            found[f"{name}_p50"], found[f"{name}_p99"] = value
        else:
            found[name] = value
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _script_from(
    whole: Script, engine: Engine, left: list[Aborted], without: Collection[int]
) -> Script:
    """Return what the requests do that an engine has, or that arrive later.

    left: clients that leave later.
    """
    script = Script(whole.link_tokens, links=whole.links, beams=whole.beams)
    begun = engine.strategy.request_ids
    script.arrivals = [
        arrived
        for arrived in whole.arrivals
        if arrived.id in begun or (arrived.id >= engine.next_id and arrived.id not in without)
    ]
    for arrived in script.arrivals:
        script.num_generated |= {
            id: whole.num_generated[id]
            for id in range(arrived.id, arrived.id + arrived.num_samples)
        }
    ids = {arrived.id for arrived in script.arrivals}
    script.aborts = [abort for abort in left if abort.id in ids]
    return script
