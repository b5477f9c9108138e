"""A helper process that fails at each job that contains the word `hungry` or `exit`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from container.isolation.jobs import Done
from core.process.frames import OUT_OF_MEMORY, run_helper


def start(setup: bytes) -> Callable[[bytes], Done]:
    return perform


def perform(job: bytes) -> Done:
    if b"hungry" in job:
        raise MemoryError
    if b"exit" in job:
        sys.exit(OUT_OF_MEMORY)
    return Done("done")


if __name__ == "__main__":
    sys.exit(run_helper(int(sys.argv[1]), start))
