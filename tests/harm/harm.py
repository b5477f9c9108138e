"""`harm`: sends each hostile request while ordinary clients run, and measures what it costs them.

Each hostile request is a row of the table in `rows`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import psutil
from tqdm import tqdm

from tests.harm.neighbours import PING_INTERVAL_S, Attempt, Neighbour, ping, stop_all, stream
from tests.harm.rows import CLOSED, HELD, Row, send

WARM_UP_S = 2.0
ALONE_S = 3.0
"""How long the neighbours run after the warm-up, to measure their speed without rows."""
AFTER_S = 0.5
"""How long a row is watched after its end."""
EXPENDABLE = "container.isolation"
"""Part of the command lines of processes that may crash. The server starts new ones."""
HEADINGS = ("row", "status", "seconds", "/ping ms", "failed", "slowdown", "lost", "broken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits on the effects of a row on other clients."""

    ping_s: float
    row_s: float
    """Time after which a row counts as held."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The effects of a row."""

    row: str
    status: str
    seconds: float
    longest_ping_s: float
    neighbours_failed: int
    slowdown: float | None
    """Mean time of the neighbours' requests, relative to their mean time without a row."""
    processes_lost: int | None
    """None if the server is not one of our processes."""
    broken: list[str]
    """The limits that the row broke, in words."""


class Harm:
    """Sends rows to a server beside ordinary clients, and measures the effects on them."""

    def __init__(
        self,
        url: str,
        bounds: Bounds,
        *,
        num_streams: int,
        processes: Callable[[], Sequence[psutil.Process]] | None = None,
    ) -> None:
        """processes: returns the server's processes, if they run on this machine."""
        self._url = url
        self._bounds = bounds
        self._processes = processes
        self._ping = Neighbour(partial(ping, url), PING_INTERVAL_S)
        self._streams = [Neighbour(partial(stream, url)) for _ in range(num_streams)]
        time.sleep(WARM_UP_S)
        begin = time.perf_counter()
        time.sleep(ALONE_S)
        alone = self._attempts(begin, time.perf_counter())
        failures = [attempt.failure for attempt in alone if attempt.failure]
        if failures or not alone:
            self.stop()
            raise ValueError(f"the server does not answer ordinary requests: {failures[:1]}")
        self._alone_s = statistics.fmean(attempt.end - attempt.begin for attempt in alone)

    def stop(self) -> None:
        """End the ordinary clients."""
        stop_all((self._ping, *self._streams))

    def measure(self, row: Row) -> Outcome:
        """Send a row and return its effects."""
        payload = row.make()
        before = self._running()
        begin = time.perf_counter()
        reply = send(self._url, payload, self._bounds.row_s)
        time.sleep(AFTER_S)
        end = time.perf_counter()
        pings = self._ping.during(begin, end)
        attempts = self._attempts(begin, end)
        durations = [attempt.end - attempt.begin for attempt in attempts if not attempt.failure]
        after = self._running()
        lost = None if before is None or after is None else len(before - after)
        return Outcome(
            row=row.name,
            status=reply.status,
            seconds=reply.seconds,
            longest_ping_s=_longest(pings),
            neighbours_failed=sum(bool(attempt.failure) for attempt in attempts),
            slowdown=statistics.fmean(durations) / self._alone_s if durations else None,
            processes_lost=lost,
            broken=self._broken(row, reply.status, pings, attempts, lost),
        )

    def _broken(
        self,
        row: Row,
        status: str,
        pings: Sequence[Attempt],
        attempts: Sequence[Attempt],
        lost: int | None,
    ) -> list[str]:
        """Return the limits that a row broke."""
        broken = [f"/ping: {failure}" for failure in _failures(pings)]
        broken += [f"neighbour: {failure}" for failure in _failures(attempts)]
        if (longest := _longest(pings)) > self._bounds.ping_s:
            broken.append(f"/ping took {longest * 1000:.0f} ms")
        if lost:
            broken.append(f"{lost} processes lost")
        if status == HELD:
            broken.append(f"held for {self._bounds.row_s:g} s")
        elif row.needs_response and (
            status == CLOSED or (status.startswith("5") and status != "503")
        ):
            broken.append(f"answer: {status}")
        return broken

    def _attempts(self, begin: float, end: float) -> list[Attempt]:
        return [attempt for stream in self._streams for attempt in stream.during(begin, end)]

    def _running(self) -> set[int] | None:
        """Return the server's processes that must survive."""
        if self._processes is None:
            return None
        return {process.pid for process in self._processes() if not _is_expendable(process)}


def _longest(attempts: Sequence[Attempt]) -> float:
    return max((attempt.end - attempt.begin for attempt in attempts), default=0.0)


def _failures(attempts: Sequence[Attempt]) -> list[str]:
    """Return why attempts failed, each reason once."""
    return [*dict.fromkeys(attempt.failure for attempt in attempts if attempt.failure)]


def _is_expendable(process: psutil.Process) -> bool:
    try:
        return any(EXPENDABLE in word for word in process.cmdline())
    except psutil.Error:
        return True  # it has ended


def measure_all(harm: Harm, rows: Sequence[Row]) -> list[Outcome]:
    """Send every row, with a progress bar."""
    outcomes: list[Outcome] = []
    with tqdm(rows, desc="harm", unit="row", disable=None) as bar:
        for row in bar:
            bar.set_postfix_str(row.name)
            outcomes.append(harm.measure(row))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table of text."""
    cells = [HEADINGS, *map(_cells, outcomes)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS) - 1)]
    lines = []
    for first, *numbers, last in cells:
        middle = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *middle, last]).rstrip())
    return "\n".join(lines)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.row,
        outcome.status,
        f"{outcome.seconds:.2f}",
        f"{outcome.longest_ping_s * 1000:.0f}",
        str(outcome.neighbours_failed),
        "" if outcome.slowdown is None else f"{outcome.slowdown:.1f}x",
        "" if outcome.processes_lost is None else str(outcome.processes_lost),
        "; ".join(outcome.broken),
    )
