"""Two futures of one moment: with the recorded options, and with others or without some requests.

Both begin with an empty memory, and with the requests that had not ended by then in the queue.
These go on where they were: what they had generated is part of their prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property

import msgspec

from benchmarks.load.journal import percentile
from benchmarks.replay.cost import FittedCost, fitted
from benchmarks.replay.forecast import check_computable, serve
from benchmarks.replay.page.rows import Row, Rows
from benchmarks.replay.page.tape import Tape
from benchmarks.replay.script import Script
from benchmarks.replay.settings import changed
from core.configuration.record import Value
from core.request import Request
from engine.executor import Observer
from engine.observers.frames import DIGEST_BYTES, Arrived
from strategies.base import Strategy
from strategies.factory import StrategySettings


class Future(msgspec.Struct, frozen=True):
    """What happens after a moment."""

    settings: StrategySettings
    figures: dict[str, float]
    """By name, in seconds or per second; without any if no request gets a token."""
    rows: list[Row]
    num_refused: int
    """Requests that do not fit with these options."""


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

        without: requests that are left out of the second one.

        Raises ValueError or ConfigurationError if it cannot be computed.
        """
        header = self._tape.recording.header
        check_computable(header)
        settings = changed(header.settings, changes)
        return (
            self._future(header.settings, script_from(self._tape, at)),
            self._future(settings, script_from(self._tape, at, without)),
        )

    def _future(self, settings: StrategySettings, script: Script) -> Future:
        rows: dict[int, Row] = {}

        def watch(strategy: Strategy, clock_ns: Callable[[], int]) -> Iterable[Observer]:
            watcher = Rows(strategy, clock_ns)
            nonlocal rows
            rows = watcher.rows
            return (watcher,)

        header = self._tape.recording.header
        tally, num_refused = serve(header, settings, script, self.cost, watch=watch)
        found = tally.figures()
        figures = {} if found is None else _named(dataclasses.asdict(found))
        waits = [row.admitted - row.arrived for row in rows.values() if row.admitted is not None]
        if waits:
            figures |= {"wait_p50": percentile(waits, 0.5), "wait_p99": percentile(waits, 0.99)}
        return Future(settings, figures, list(rows.values()), num_refused)


def _named(figures: Mapping[str, float | tuple[float, float]]) -> dict[str, float]:
    """Return each figure by its name; of two, the median and the 99th percentile."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, tuple):
            found[f"{name}_p50"], found[f"{name}_p99"] = value
        else:
            found[name] = value
    return found


def script_from(tape: Tape, at: float, without: Collection[int] = ()) -> Script:
    """Return what the requests do that have not ended by a moment, or arrive later.

    A request with several samples, or a search, begins again.
    """
    engine = tape.to(tape.index_at(at)).engine
    unfinished = {
        group.request.id: group.request
        for group in (*engine.strategy.running, *engine.strategy.waiting)
    }
    old = tape.script
    script = Script(old.link_tokens, links=old.links, beams=old.beams)
    for arrived in old.arrivals:
        if arrived.id in without or (arrived.id < engine.next_id and arrived.id not in unfinished):
            continue
        script.num_generated |= {
            id: old.num_generated[id] for id in range(arrived.id, arrived.id + arrived.num_samples)
        }
        if arrived.id in unfinished:
            arrived = _resumed(script, arrived, unfinished[arrived.id], at)
        script.arrivals.append(arrived)
    ids = {arrived.id for arrived in script.arrivals}
    script.aborts = [each for each in old.aborts if each.id in ids and each.at_ns / 1e9 > at]
    return script


def _resumed(script: Script, arrived: Arrived, request: Request, at: float) -> Arrived:
    """Return a request that arrives now and goes on where it was."""
    if arrived.num_samples > 1 or arrived.width:
        return msgspec.structs.replace(arrived, at=at)
    [sequence] = request.sequences
    count, size = sequence.num_generated_tokens, script.link_tokens
    script.num_generated[arrived.id] -= count
    num_tokens = arrived.num_prompt_tokens + count
    known = len(arrived.links) // DIGEST_BYTES
    ends = range((known + 1) * size, num_tokens + 1, size)
    digests = (script.token(arrived.id, end - 1) << 2 for end in ends)
    return msgspec.structs.replace(
        arrived,
        at=at,
        num_prompt_tokens=num_tokens,
        max_tokens=arrived.max_tokens - count,
        links=arrived.links + b"".join(digest.to_bytes(DIGEST_BYTES) for digest in digests),
    )
