"""Child processes, which are killed together with everything that they start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

OPENMP_SPIN_COUNT = "10000"
"""How many times an idle OpenMP thread polls for work before it sleeps (GOMP_SPINCOUNT).

This takes about 0.2 ms, which covers the time that Python needs between two matmuls. Waking
sleeping threads for each matmul costs up to a third of the engine's speed on a CPU
(docs/benchmarks.md); spinning for longer takes CPU time from the front end.
"""


class Child:
    """A child process in its own session, so that a terminal's Ctrl-C does not reach it.

    Create it in the main thread. The child itself must call
    `core.process.processes.die_with_parent` with this process's id, which the caller puts into
    `command`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] = os.environ,
        output: int | None = None,
    ) -> None:
        """`output` is a file descriptor for stdout and stderr; None means those of this process."""
        self.name = name
        self._process = subprocess.Popen(
            list(command),
            env=_with_openmp_settings(variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while the process runs, negative if a signal ended it."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM. Does nothing if the process has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its process group, and wait until the process has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def describe_exit(self) -> str:
        """Return a phrase for the exit code, such as "ended with exit code 1"."""
        code = self.exit_code
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = ", possibly out of memory" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"


def _with_openmp_settings(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Add the spin count of OpenMP threads, unless the user has set OMP_WAIT_POLICY."""
    if "OMP_WAIT_POLICY" in variables:
        return variables
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": OPENMP_SPIN_COUNT, **variables}
