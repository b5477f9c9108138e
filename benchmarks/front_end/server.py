"""The real front end, gunicorn with its workers, and what it takes of the CPU.

`python -m benchmarks.front_end.server LAUNCH_JSON FOLDER`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from flask import Flask

from benchmarks.cpu.http_server import ROOT, MeasurementError, free_port
from benchmarks.front_end.sampler import Sampler
from container.front_end.start import FrontEnd, read_launch
from core.configuration.options import Options
from core.process.internal_arguments import internal_arguments
from core.process.names import full_name
from core.process.processes import die_with_parent
from core.protocol.launch import Launch

START_S = 60.0
POLL_S = 0.02


class SampledFrontEnd(FrontEnd):
    """A front end whose workers sample where their time goes."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._folder = folder
        super().__init__(launch)

    def load(self) -> Flask:
        Sampler(self._folder).start()
        return super().load()


class Workers:
    """The worker processes of a running front end."""

    def __init__(self, port: int, processes: Sequence[psutil.Process], folder: Path | None) -> None:
        """folder: of the processes' samples, if they take any."""
        self.port = port
        self._processes = processes
        self._folder = folder

    def cpu_s(self) -> float:
        """Return the CPU seconds that all workers have used."""
        times = [process.cpu_times() for process in self._processes]
        return sum(spent.user + spent.system for spent in times)

    def samples(self) -> Mapping[str, int]:
        """Return the samples by function since the last call."""
        counts: Counter[str] = Counter()
        if self._folder is None:
            return counts
        for process in self._processes:
            file = self._folder / f"{process.pid}.json"
            file.unlink(missing_ok=True)
            process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + START_S
            while not file.exists() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            counts.update(msgspec.json.decode(file.read_bytes(), type=dict[str, int]))
        return counts


@contextmanager
def front_end(model: Path, folder: Path, options: Options) -> Iterator[Workers]:
    """Run the front end with a fake engine. Raises MeasurementError if it does not start."""
    folder.mkdir(parents=True, exist_ok=True)
    port, launch_file = free_port(), folder / "launch.json"
    launch = Launch(
        model_dir=str(model),
        endpoint=f"ipc://{folder}/engine.sock",
        port=port,
        host="127.0.0.1",
        options=options,
    )
    launch_file.write_bytes(msgspec.json.encode(launch))
    commands = {
        "benchmarks.front_end.engine": (launch.endpoint, str(model)),
        "benchmarks.front_end.server": (str(launch_file), str(folder)),
    }
    processes = [
        subprocess.Popen([sys.executable, "-m", full_name(module), *arguments], cwd=ROOT)
        for module, arguments in commands.items()
    ]
    try:
        _wait_until_ready(processes, port)
        yield Workers(port, psutil.Process(processes[1].pid).children(), folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait_until_ready(processes: list[subprocess.Popen[bytes]], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if _is_healthy(port):
            return
        time.sleep(POLL_S)
    raise MeasurementError("the front end did not become ready")


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5):
            return True
    except OSError:
        return False


def main(launch_path: str, folder: str) -> None:
    """Serve until the process that started this one ends."""
    die_with_parent(os.getppid())
    # As in `container.front_end.start`: texts are tokenized one at a time.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    SampledFrontEnd(read_launch(Path(launch_path)), Path(folder)).run()


if __name__ == "__main__":
    description = "The front end, with a sampler. `python -m benchmarks.front_end` starts it."
    form = "LAUNCH_JSON FOLDER"
    main(*internal_arguments("benchmarks.front_end.server", description, form))
