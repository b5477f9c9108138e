"""One engine of the supervisor: its process, and the process that replaces it after a restart."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence

import zmq

from container.launch.children import Child
from container.launch.readiness import ReadinessWatch
from core.configuration.options import Options
from core.errors import ConfigurationError, InsufficientMemoryError
from core.protocol.facts import Facts

logger = logging.getLogger(__name__)

_FINAL_EXIT_CODES = (ConfigurationError.exit_code, InsufficientMemoryError.exit_code)
"""Exit codes of an engine that would fail again if it were restarted. An engine that has served may
be restarted even after these codes: its configuration was right, and something else has changed,
perhaps on another machine."""


class EngineProcess:
    """Starts an engine, waits until it is ready, and starts it again as often as allowed.

    Use it in the main thread.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        endpoint: str,
        options: Options,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        """name: for the log. variables: the environment of the process."""
        self.name = name
        self.has_served = False
        """Whether the engine has ever been ready."""
        self.is_given_up = False
        """Whether it has ended and will not be started again."""
        self._command = command
        self._variables = variables
        self._endpoint = endpoint
        self._loading_timeout_s = options.execution.model_loading_timeout
        self._restarts_left = options.server.retry_threshold
        self._context = context
        self._loading_timed_out = False
        self._start()

    @property
    def is_starting(self) -> bool:
        """Whether the engine is not ready yet."""
        return self._readiness is not None

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended. The caller then calls `restart` or `give_up`."""
        return not self.is_given_up and self.child.exit_code is not None

    @property
    def final_exit_code(self) -> int:
        """The exit code of the container, if the end of this engine ends the container."""
        code = self.child.exit_code
        if code in _FINAL_EXIT_CODES:
            return code
        # Assume that SIGKILL during loading came from the kernel's out-of-memory killer.
        out_of_memory = (
            code == -signal.SIGKILL and not self.has_served and not self._loading_timed_out
        )
        return InsufficientMemoryError.exit_code if out_of_memory else 1

    def wait_until_ready(self, timeout_s: float) -> Facts | None:
        """Wait at most `timeout_s` for a starting engine. Return its facts once it is ready.

        Kills an engine that is overdue.
        """
        assert self._readiness is not None
        facts = self._readiness.wait(timeout_s)
        if facts is not None:
            self.has_served = True
            self._close_readiness()
        elif time.monotonic() > self._loading_deadline:
            logger.error(
                "%s is not ready after %d s (option.model_loading_timeout)",
                self.name,
                self._loading_timeout_s,
            )
            self._loading_timed_out = True
            self.child.kill()
        return facts

    def restart(self) -> bool:
        """Start the engine again, if it has restarts left and its exit code allows it."""
        is_final = not self.has_served and self.child.exit_code in _FINAL_EXIT_CODES
        if is_final or not self._restarts_left:
            return False
        self._restarts_left -= 1
        logger.warning("restarting the %s, restarts_left=%d", self.name, self._restarts_left)
        self.close()
        self._start()
        return True

    def give_up(self) -> None:
        """Kill what is left of the engine's processes, and start no others."""
        self.close()
        self.is_given_up = True

    def close(self) -> None:
        """Kill the process and its process group."""
        if not self.is_given_up:  # else its process id may belong to another process by now
            self.child.kill()
        self._close_readiness()

    def _start(self) -> None:
        self._readiness: ReadinessWatch | None = ReadinessWatch(self._context, self._endpoint)
        self._loading_deadline = time.monotonic() + self._loading_timeout_s
        self.child = Child(self.name, self._command, variables=self._variables)

    def _close_readiness(self) -> None:
        if self._readiness is not None:
            self._readiness.close()
            self._readiness = None
