"""Where a worker's CPU time goes: a sample of the running function every 2 ms of CPU time."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import msgspec

INTERVAL_S = 0.002
PARTS: Mapping[str, tuple[str, ...]] = {
    "engine's messages": ("container/wire/", "core/protocol/", "/zmq/"),
    "detokenizing": ("core/text/",),
    "records and JSON": ("container/apis/", "container/http/", "container/schema/"),
    "Flask": ("/flask/", "/werkzeug/", "container/security/", "container/hooks/"),
    "HTTP": ("/gunicorn/", "container/front_end/"),
    "sending, receiving": ("gevent/_socket", "gevent/ssl.py"),
    "event loop": ("/gevent/",),
}
"""Parts of paths of files, by the part of the work that their functions do. The first fits."""


class Sampler:
    """Counts samples by function. Writes the counts when the process gets SIGUSR2.

    The time of a call into C, such as `send`, counts for the Python function that makes it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}.json"
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR2, self._write)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        if frame is not None:
            code = frame.f_code
            self._counts[f"{code.co_filename}:{code.co_qualname}"] += 1

    def _write(self, number: int, frame: FrameType | None) -> None:
        """Write the counts since the last writing. Readers never see half of them."""
        written = self._file.with_suffix(".part")
        written.write_bytes(msgspec.json.encode(self._counts))
        written.rename(self._file)
        self._counts.clear()


def shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the share of each part of the work in the samples."""
    by_part: Counter[str] = Counter(dict.fromkeys((*PARTS, "other"), 0))
    for function, count in counts.items():
        by_part[_part_of(function)] += count
    return {part: count / max(1, sum(counts.values())) for part, count in by_part.items()}


def _part_of(function: str) -> str:
    fits = (part for part, places in PARTS.items() if any(place in function for place in places))
    return next(fits, "other")
