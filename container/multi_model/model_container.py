"""The processes of one model of several, and the socket on which they serve it."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path

import gevent
from gevent.fileobject import FileObjectPosix

from container.configuration.report import REFUSAL
from container.launch.children import Child
from container.multi_model.connection import UnixConnection

COMMAND = (sys.executable, "-m", "container.multi_model.child")
_LOOK_INTERVAL_S = 0.05
_LAST_LINES = 40
_LAST_WORDS_S = 5.0


class ModelContainer:
    """A child process with all that it starts; what they say goes to our output, by the name."""

    def __init__(
        self,
        name: str,
        socket: Path,
        command: Sequence[str],
        variables: Mapping[str, str],
    ) -> None:
        self.socket = socket
        self._name = name
        self._is_asked_to_end = False
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        reading, writing = os.pipe()
        try:
            self._child = Child(name, command, variables=variables, output=writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._relay: gevent.Greenlet[[], None] = gevent.spawn(self._relay_lines, reading)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._child.exit_code

    def wait_until_ready(self) -> bool:
        """True once it answers requests; False where it has ended, and said all it had to say."""
        while self.exit_code is None:
            if self._is_healthy():
                return True
            gevent.sleep(_LOOK_INTERVAL_S)
        self._relay.join(_LAST_WORDS_S)
        return False

    def why_it_ended(self) -> str:
        """Its own reasons; the last line that it said, where it gave none."""
        reasons = [each.removeprefix(REFUSAL) for each in self._lines if each.startswith(REFUSAL)]
        said = reasons or [each for each in self._lines if each.strip()][-1:]
        return "\n".join(said) or f"its container {self._child.how_it_ended()}"

    def terminate(self) -> None:
        """Asks it to end as a stopped container does: what runs may end, and is told in the end.

        May be repeated.
        """
        if not self._is_asked_to_end:
            self._is_asked_to_end = True  # asked a second time, it would make haste
            self._child.terminate()

    def stop(self, within_s: float) -> None:
        """The same, and waits; nothing of it is left then."""
        self.terminate()
        deadline = time.monotonic() + within_s
        while self.exit_code is None and time.monotonic() < deadline:
            gevent.sleep(_LOOK_INTERVAL_S)
        self.kill()

    def kill(self) -> None:
        """Ends it at once; nothing of it is left then."""
        self._child.kill()
        # The kernel kills what it had started, and only when all of it has gone the pipe ends.
        self._relay.join(_LAST_WORDS_S)
        self.socket.unlink(missing_ok=True)

    def _is_healthy(self) -> bool:
        connection = UnixConnection(self.socket)
        try:
            connection.request("GET", "/ping")
            answer = connection.getresponse()
            answer.read()
            return answer.status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _relay_lines(self, reading: int) -> None:
        with FileObjectPosix(reading, "rb") as lines:
            for line in lines:
                text = line.decode("utf-8", "replace").rstrip("\n")
                self._lines.append(text)
                print(f"[{self._name}] {text}", flush=True)
