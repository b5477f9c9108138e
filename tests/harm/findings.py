"""The result of a soak: how requests ended, and whether the server's processes have grown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tests.harm.neighbours import Attempt

MAX_GROWTH = 0.25
MAX_GROWTH_BYTES = 48 * 2**20
"""How much the memory of all processes of a role together may grow after the part without kills: by
the share MAX_GROWTH, plus this many bytes."""
MAX_MORE_FILES = 8
MAX_MORE_THREADS = 4
"""How many more open files and threads each process may have. The kernel may still hold
connections, and pools may start threads late."""


class Usage(msgspec.Struct, frozen=True):
    """Resources of all processes of one role together."""

    processes: int
    rss_bytes: int
    threads: int
    files: int


class Findings(msgspec.Struct, kw_only=True):
    """The result of a soak."""

    seconds: float
    requests: dict[str, int]
    """Requests by kind of client."""
    ends: dict[str, int]
    """How the requests of ordinary clients ended: whole, failed in the outage after a kill, or
    failed at another time."""
    kills: dict[str, int]
    """Number of kills, by role."""
    before: dict[str, Usage]
    """Usage by role after the part without kills."""
    after: dict[str, Usage]
    broken: list[str]

    def text(self) -> str:
        """Return the findings as lines for people."""
        lines = [
            f"{self.seconds:.0f} s; requests: {_listed(self.requests)}",
            f"ordinary requests: {_listed(self.ends)}; kills: {_listed(self.kills)}",
        ]
        for role, usage in self.after.items():
            lines.append(f"{role}: {_usage(self.before.get(role))} -> {_usage(usage)}")
        return "\n".join([*lines, *(f"BROKEN: {what}" for what in self.broken)])


def count_ends(
    attempts: Sequence[Attempt], outages: Sequence[tuple[float, float]]
) -> tuple[dict[str, int], list[str]]:
    """Return how requests ended, and what is wrong. A request may fail only in an outage."""
    ends, broken = Counter[str](), list[str]()
    for attempt in attempts:
        if not attempt.failure:
            ends["whole"] += 1
        elif any(attempt.begin < up and down < attempt.end for down, up in outages):
            ends["failed in an outage"] += 1
        else:
            ends["failed"] += 1
            broken.append(f"a request failed without a kill: {attempt.failure}")
        if "finish reasons" in attempt.failure and " 0 ends" not in attempt.failure:
            broken.append(f"an answer did not end exactly once: {attempt.failure}")
    return dict(ends), broken


def grown(before: dict[str, Usage], after: dict[str, Usage]) -> list[str]:
    """Return the resources that have grown beyond their limits, in words."""
    broken = []
    for role, was in before.items():
        now = after.get(role)
        if now is None or now.processes != was.processes:
            broken.append(f"{role}: {_usage(was)} -> {_usage(now)}")
            continue
        limit = was.rss_bytes * (1 + MAX_GROWTH) + MAX_GROWTH_BYTES
        if now.rss_bytes > limit:
            broken.append(f"{role}: memory grew from {_usage(was)} to {_usage(now)}")
        if now.files > was.files + MAX_MORE_FILES * was.processes:
            broken.append(f"{role}: open files grew from {_usage(was)} to {_usage(now)}")
        if now.threads > was.threads + MAX_MORE_THREADS * was.processes:
            broken.append(f"{role}: threads grew from {_usage(was)} to {_usage(now)}")
    return broken


def _usage(usage: Usage | None) -> str:
    if usage is None:
        return "none"
    return (
        f"{usage.processes} processes, {usage.rss_bytes / 2**20:.0f} MiB, "
        f"{usage.threads} threads, {usage.files} files"
    )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
