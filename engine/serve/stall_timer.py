"""Detects a hung step: it does not end, and every thread of the process sleeps.

In a step that is merely long, a thread computes. A step that waits for a device counts as busy too,
since CUDA's own wait keeps the processor running.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

MIN_STEP_AGE_S = 0.75
"""Younger steps are not checked, which saves reading /proc."""
_TASKS = Path("/proc/self/task")
_ACTIVE_STATES = "RD"
"""Thread states of proc(5): running or ready to run, and waiting for a disk."""


class StallTimer:
    """Measures how long no other thread of this process has run within a step.

    Used by the thread that sends heartbeats, once for each heartbeat.
    """

    def __init__(self, is_active: Callable[[], bool] | None = None) -> None:
        self._is_active = is_active or Activity()
        self._stalled_since: float | None = None

    def seconds(self, step_age_s: float, now: float) -> float:
        """Return how long the current step has stood still. step_age_s: the age of the step."""
        if step_age_s < MIN_STEP_AGE_S or self._is_active():
            self._stalled_since = None
            return 0.0
        if self._stalled_since is None:
            self._stalled_since = now
        return now - self._stalled_since


class Activity:
    """Tells whether another thread of this process runs, or has run since the last call."""

    def __init__(self, tasks: Path = _TASKS) -> None:
        self._tasks = tasks
        self._ticks: dict[str, int] = {}

    def __call__(self) -> bool:
        """Return whether a thread has run; True also without /proc."""
        if not self._tasks.is_dir():
            return True
        own_id, before = str(threading.get_native_id()), self._ticks
        stats = {path.name: _stat(path) for path in self._tasks.iterdir() if path.name != own_id}
        self._ticks = {name: ticks for name, (_, ticks) in stats.items()}
        is_running = any(state in _ACTIVE_STATES for state, _ in stats.values())
        return is_running or self._ticks != before


def _stat(task: Path) -> tuple[str, int]:
    """Return a thread's state and the clock ticks that it has run, as in proc(5)."""
    try:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # the thread has ended
        return "X", 0
    return fields[0], int(fields[11]) + int(fields[12])
