"""Runs a Longshore container in a child process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import javaproperties
import psutil

from loadtest.servers.clients.transport import HttpTransport, SendError

START_S = 1800.0
STOP_S = 60.0
POLL_S = 0.1
_DEFAULT = Path("serving.properties")
_ALIAS = "max_dynamic_batch_size"
"""LMI's name for batch_size."""
PACKAGE_PREFIX = __name__.removesuffix("loadtest.servers.server")
"""Prefix of our packages' names: `longshore.` in an installed wheel, else empty."""


class ServerError(Exception):
    """The server exited during start-up or was not ready in time.

    If it exited, the error message has the last lines of its log.
    """


class Server:
    """Context manager for a running container.

    Inside the block /ping answers 200; after the block all of the server's processes have exited.
    """

    def __init__(
        self,
        properties: Mapping[str, str],
        log: Path,
        *,
        model_dir: Path | None = None,
        temporary: Path | None = None,
    ) -> None:
        """temporary: the server's TMPDIR. None: the TMPDIR of this process."""
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_s = 0.0
        """Seconds until the server was ready."""
        self._properties = properties
        self._log = log
        self._model_dir = model_dir
        self._temporary = temporary

    def __enter__(self) -> Server:
        started = time.perf_counter()
        self._folder = tempfile.TemporaryDirectory(prefix="loadtest-")
        file = Path(self._folder.name, "serving.properties")
        with file.open("w", encoding="latin-1") as out:
            javaproperties.dump(dict(self._properties), out, timestamp=False)
        command = [
            sys.executable,
            "-m",
            f"{PACKAGE_PREFIX}container",
            "serve",
            "--port",
            str(self.port),
        ]
        command += ["--properties", str(file)]
        if self._model_dir is not None:
            command += ["--model-dir", str(self._model_dir)]
        with self._log.open("w") as log:
            # In its own session, so that Ctrl-C only reaches this process.
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=None
                if self._temporary is None
                else {**os.environ, "TMPDIR": str(self._temporary)},
            )
        try:
            self._wait_until_ready(started + START_S)
        except BaseException:
            self._stop()
            raise
        self.start_s = time.perf_counter() - started
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def processes(self) -> list[psutil.Process]:
        """Return the server's process and all its descendants."""
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def _wait_until_ready(self, deadline: float) -> None:
        transport = HttpTransport(self.url, 5.0)
        try:
            while time.perf_counter() < deadline:
                if self._process.poll() is not None:
                    raise ServerError(f"the server exited during start-up:\n{self._last_lines()}")
                try:
                    transport.get("/ping")
                    return
                except SendError:
                    time.sleep(POLL_S)
        finally:
            transport.close()
        raise ServerError(f"the server was not ready within {START_S:.0f} s")

    def _stop(self) -> None:
        processes = self.processes() if self._process.poll() is None else []
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        _, alive = psutil.wait_procs(processes, timeout=STOP_S)
        for process in alive:
            process.kill()
        self._folder.cleanup()

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])


def given_properties(path: Path | None) -> dict[str, str]:
    """Read the file that --properties names.

    None stands for `serving.properties` in the current folder. If this file does not exist, there
    are no properties. Raises ValueError if `path` is not a file.
    """
    if path is None:
        return read_properties(_DEFAULT) if _DEFAULT.is_file() else {}
    if not path.is_file():
        raise ValueError(f"{path} is not a file; set --properties")
    return read_properties(path)


def read_properties(path: Path) -> dict[str, str]:
    """Read a serving.properties file, resolving a relative model directory against its folder."""
    with path.open("rb") as file:
        properties = javaproperties.load(file)
    model = properties.get("option.model_id", "")
    if model and (path.parent / model).exists():
        properties["option.model_id"] = str((path.parent / model).resolve())
    if _ALIAS in properties:  # tuning sets `batch_size`
        properties["batch_size"] = properties.pop(_ALIAS)
    return properties


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
