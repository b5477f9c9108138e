"""Child processes that never outlive the supervisor, each with everything it starts itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

SPINS = "10000"
"""Looks that a thread of OpenMP's takes for the next task, before it sleeps: about 0.2 ms, as long
as Python takes from one product to the next. Waking it each time costs up to a third of an engine's
speed on a CPU (docs/benchmarks.md); spinning for long keeps its core from the front end."""


class Child:
    """A process in a session of its own, so that a terminal's Ctrl-C does not reach it.

    It must be started by the main thread, and must itself call `core.processes.die_with_parent`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] = os.environ,
        output: int | None = None,
    ) -> None:
        """`output`: a file descriptor for all that it says; None: where this process says it."""
        self.name = name
        self._process = subprocess.Popen(
            list(command),
            env=_with_patience(variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._process.poll()

    def terminate(self) -> None:
        """Asks it to end; harmless where it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it and all it started, and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def how_it_ended(self) -> str:
        """The exit code in words."""
        code = self.exit_code
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"


def _with_patience(variables: Mapping[str, str]) -> Mapping[str, str]:
    """How long OpenMP's threads spin while they wait, unless that has been said."""
    if "OMP_WAIT_POLICY" in variables:
        return variables
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPINS, **variables}
