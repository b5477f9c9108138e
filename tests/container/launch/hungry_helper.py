"""A helper process that runs out of memory at each job that contains the word `hungry`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from container.isolation.jobs import Done
from core.process.frames import run_helper


def start(setup: bytes) -> Callable[[bytes], Done]:
    return perform


def perform(job: bytes) -> Done:
    if b"hungry" in job:
        raise MemoryError
    return Done("done")


if __name__ == "__main__":
    sys.exit(run_helper(int(sys.argv[1]), start))
