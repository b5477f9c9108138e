"""Notices within a few seconds that another rank has ended, stopped, or failed.

Without this, the other ranks would wait for it in a collective. The ranks count their beats in the
store, which is in the process of rank 0, and leave their failure reports there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from subprocess import Popen
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a rank checks its arguments before it imports torch
    from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it

TICK_S = 0.5
MAX_SILENT_TICKS = 6
"""How long a rank may be silent. Counted in ticks of the process that listens, so that the time in
which the whole machine is suspended does not count."""
CULPRIT_S = 0.5
"""How long to wait, if all lost ranks have left a failure report, for a rank that ends without a
report. That rank is then the one at fault."""

OnLost = Callable[[int, bytes], None]
"""Called once, in the watch's thread, with the lost rank and its encoded FailureReport, if any."""


class RankWatch:
    """Rank 0's watch over the other ranks, in a thread of its own."""

    def __init__(
        self, store: TCPStore, size: int, processes: Mapping[int, Popen[bytes]], on_lost: OnLost
    ) -> None:
        """size: the number of ranks. processes: those of the ranks on this machine, by rank."""
        self._store = store
        self._processes = processes
        self._on_lost = on_lost
        self._beats = dict.fromkeys(range(1, size), 0)
        self._silent_ticks = dict.fromkeys(range(1, size), 0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. May be called again, but not by `on_lost`."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            lost = self._lost()
            if lost and all(lost.values()):
                # A rank that ends without a report makes the others' collectives fail.
                if self._stopped.wait(CULPRIT_S):
                    return
                lost = self._lost()
            if lost:
                culprit = next((rank for rank, report in lost.items() if not report), min(lost))
                self._on_lost(culprit, lost[culprit])
                return

    def _lost(self) -> dict[int, bytes]:
        """Return the ranks that are lost now, with their reports. Call it once in a tick."""
        lost = dict[int, bytes]()
        for rank in self._beats:
            has_stopped = self._has_stopped(rank)  # first, as a rank reports before it ends
            key = _report_key(rank)
            report = self._store.get(key) if self._store.check([key]) else b""
            if has_stopped or report:
                lost[rank] = report
        return lost

    def _has_stopped(self, rank: int) -> bool:
        beats, last = self._store.add(_beats_key(rank), 0), self._beats[rank]
        self._beats[rank] = beats
        # A rank that has not begun to beat is still importing torch.
        self._silent_ticks[rank] = self._silent_ticks[rank] + 1 if beats == last > 0 else 0
        process = self._processes.get(rank)
        has_ended = process is not None and process.poll() is not None
        return has_ended or self._silent_ticks[rank] > MAX_SILENT_TICKS


class Beats:
    """The beats of a rank other than 0. Ends the process if rank 0 ends or no longer answers."""

    def __init__(self, store: TCPStore, rank: int) -> None:
        """store: a connection of its own, since a call that waits keeps other threads waiting."""
        self._store, self._rank = store, rank
        self._silent_ticks = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._thread.start()
        # The store has no time limit for its answers.
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    def stop(self, report: str = "") -> None:
        """Stop, and leave a failure report if given. Raises RuntimeError if rank 0 has ended."""
        self._stopped.set()
        self._thread.join()
        if report:
            key = _report_key(self._rank)
            self._store.set(key, report)
            self._store.check([key])  # is answered only after the report has arrived

    def _beat(self) -> None:
        while not self._stopped.is_set():
            try:
                self._store.add(_beats_key(self._rank), 1)
            except RuntimeError:
                os._exit(0)
            self._silent_ticks = 0
            self._stopped.wait(TICK_S)

    def _listen(self) -> None:
        while self._silent_ticks <= MAX_SILENT_TICKS:
            time.sleep(TICK_S)
            self._silent_ticks += 1
        os._exit(0)


def _beats_key(rank: int) -> str:
    return f"beats/{rank}"


def _report_key(rank: int) -> str:
    return f"report/{rank}"
