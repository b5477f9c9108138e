"""The container of one of several models: its processes, and HTTP over its Unix socket."""

from __future__ import annotations

import http.client
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path

import gevent
from gevent import socket as gevent_socket
from gevent.fileobject import FileObjectPosix

from container.configuration.report import ERROR_PREFIX
from container.launch.children import Child
from core.process.logs import JSON_START
from core.process.names import python_command

COMMAND = python_command("container.multi_model.serve_model")
_POLL_INTERVAL_S = 0.05
_NUM_KEPT_LINES = 40
_METRICS_LINE = '{"_aws":'
"""How a line in CloudWatch's embedded metric format begins (`engine/serve/emf.py`)."""
_LAST_OUTPUT_S = 5.0
"""Time to read the last output of a container that has ended."""


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket, cooperative with other greenlets."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = str(path)

    def connect(self) -> None:
        self.sock = gevent_socket.socket(gevent_socket.AF_UNIX, gevent_socket.SOCK_STREAM)
        self.sock.connect(self._path)

    def hang_up(self) -> None:
        """Shut the socket down, even while another greenlet waits for the response."""
        if self.sock is not None:
            self.sock.shutdown(gevent_socket.SHUT_RDWR)


class ModelContainer:
    """The processes of a model. Their output is printed with the model's name as prefix."""

    def __init__(
        self,
        name: str,
        socket: Path,
        command: Sequence[str],
        variables: Mapping[str, str],
    ) -> None:
        self.socket = socket
        self._name = name
        self._is_terminating = False
        self._lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        reading, writing = os.pipe()
        try:
            self._child = Child(name, command, variables=variables, output=writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._output: gevent.Greenlet[[], None] = gevent.spawn(self._copy_output, reading)

    @property
    def pid(self) -> int:
        """The process id of the container."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while the container runs, negative if a signal ended it."""
        return self._child.exit_code

    def wait_until_ready(self) -> bool:
        """Wait until the container is ready or has ended. Return whether it is ready.

        If it has ended, wait for the rest of its output, too.
        """
        while self.exit_code is None:
            if self._is_healthy():
                return True
            gevent.sleep(_POLL_INTERVAL_S)
        self._output.join(_LAST_OUTPUT_S)
        return False

    def exit_reason(self) -> str:
        """Return the errors that the container printed, else its last line, else its exit code."""
        errors = [
            line.removeprefix(ERROR_PREFIX) for line in self._lines if line.startswith(ERROR_PREFIX)
        ]
        lines = errors or [line for line in self._lines if line.strip()][-1:]
        return "\n".join(lines) or f"its container {self._child.describe_exit()}"

    def terminate(self) -> None:
        """Send SIGTERM, after which running requests may finish before the container ends.

        May be repeated.
        """
        if not self._is_terminating:
            self._is_terminating = True  # a second SIGTERM would kill running requests
            self._child.terminate()

    def stop(self, timeout_s: float) -> None:
        """Terminate, wait until the container has ended or `timeout_s` has passed, then kill."""
        self.terminate()
        deadline = time.monotonic() + timeout_s
        while self.exit_code is None and time.monotonic() < deadline:
            gevent.sleep(_POLL_INTERVAL_S)
        self.kill()

    def kill(self) -> None:
        """Kill the container and wait until all its processes have ended."""
        self._child.kill()
        # The kernel kills its descendants too. The pipe closes once all of them are gone.
        self._output.join(_LAST_OUTPUT_S)
        self.socket.unlink(missing_ok=True)

    def _is_healthy(self) -> bool:
        connection = UnixConnection(self.socket)
        try:
            connection.request("GET", "/ping")
            response = connection.getresponse()
            response.read()
            return response.status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _copy_output(self, reading: int) -> None:
        with FileObjectPosix(reading, "rb") as lines:
            for line in lines:
                text = line.decode("utf-8", "replace").rstrip("\n")
                self._lines.append(text)
                # CloudWatch and other readers of JSON need lines that are only JSON.
                prefix = "" if text.startswith((_METRICS_LINE, JSON_START)) else f"[{self._name}] "
                print(prefix + text, flush=True)
