"""Child processes that never outlive the supervisor, each with everything it starts itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


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
        # OpenMP's threads would spin while they wait for each other; where anything else runs, such
        # as the front end beside an engine on the CPU, that costs tens of times what it saves.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **variables}
        self._process = subprocess.Popen(
            list(command), env=environment, stdout=output, stderr=output, start_new_session=True
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
