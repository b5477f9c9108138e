"""The processes of ranks 1 and up, which rank 0 starts, commands and ends."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import msgspec
import torch

from core.errors import EngineUnavailableError, LongshoreError
from core.names import import_root, python_command
from core.options import Options
from engine.ranks.messages import LastWords, Order, RankLaunch
from engine.ranks.watch import Watch

logger = logging.getLogger(__name__)

COMMAND = python_command("engine.follow")
POLL_S = 0.1
END_S = 2.0
"""Time for the ranks to end by themselves, before they are killed."""
EXPLANATION_S = 1.0
"""How long a failed collective waits for the last words of a rank, which may explain it."""


class Followers:
    """Starts the ranks' processes. If one of them is lost, logs why and kills all."""

    def __init__(
        self,
        model_dir: Path,
        options: Options,
        size: int,
        device: torch.device,
        on_lost: Callable[[LongshoreError], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """on_lost: gets the error, in a thread of its own. command: starts a rank."""
        self._command = command
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.store = self._folder / "store"
        self.timeout_s = float(options.model_loading_timeout)
        self._on_lost = on_lost
        self._failure: LongshoreError | None = None
        self._has_failed = threading.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._processes: list[subprocess.Popen[bytes]] = []
        self._orders: list[Connection] = []
        beats: dict[int, Connection] = {}
        for rank in range(1, size):
            orders, beats[rank] = self._start(rank, device)
            self._orders.append(orders)
            launch = RankLaunch(
                str(model_dir), options, rank, size, str(self.store), self.timeout_s
            )
            orders.send_bytes(self._encode(launch))
        self._beats = beats
        self._watch = Watch(beats, self._lose)

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def wait(self) -> None:
        """Wait until all ranks are about to join the group.

        Raises the error of a rank that fails before that; the group would wait for it.
        """
        for connection in self._orders:
            with self.explaining():
                while not connection.poll(POLL_S):
                    if self._failure is not None:
                        raise self._failure
                connection.recv_bytes()

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Raise `explained(error)` for an error within the context."""
        try:
            yield
        except Exception as error:
            explained = self.explained(error)
            if explained is error:
                raise
            raise explained from error

    def send(self, order: Order) -> int:
        """Send an order to all ranks, and return its size in bytes.

        Raises EngineUnavailableError if a rank is lost.
        """
        message = self._encode(order)
        if self._failure is not None:
            raise self._failure
        with self.explaining():
            for connection in self._orders:
                connection.send_bytes(message)
        return len(message)

    def explained(self, error: Exception) -> Exception:
        """Return the error to raise in place of rank 0's, which another rank may have caused."""
        if isinstance(error, LongshoreError):
            return error
        self._has_failed.wait(EXPLANATION_S)
        if self._failure is not None:
            return self._failure
        # The other ranks wait for what rank 0 has not done.
        return EngineUnavailableError(f"rank 0 failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the processes. May be called again."""
        self._watch.stop()
        for connection in (*self._orders, *self._beats.values()):
            connection.close()  # which ends the process
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, device: torch.device) -> tuple[Connection, Connection]:
        """Start a rank. Return the connections of its orders and of its beats."""
        orders, their_orders = Pipe()
        beats, their_beats = Pipe()
        fds = their_orders.fileno(), their_beats.fileno()
        process = subprocess.Popen(
            [*self._command, *map(str, fds)],
            pass_fds=fds,
            env={**os.environ, **rank_variables(rank, device, os.environ)},
        )
        self._processes.append(process)
        their_orders.close()
        their_beats.close()
        return orders, beats

    def _lose(self, rank: int, words: bytes) -> None:
        """Kill all ranks, so that a collective of rank 0 fails and does not wait for them.

        gloo's does; NCCL's kernels do not notice it, so there `on_lost` has to end the process.
        """
        if words:
            error = msgspec.msgpack.decode(words, type=LastWords).error(rank)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[rank - 1].wait(0.1)
            code = self._processes[rank - 1].poll()
            how = "stopped answering" if code is None else f"ended with exit code {code}"
            error = EngineUnavailableError(f"rank {rank} {how}")
        logger.error("%s", error)
        self._failure = error
        self._has_failed.set()
        for process in self._processes:
            process.kill()
        self._on_lost(error)


def rank_variables(rank: int, device: torch.device, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that rank `rank` has in addition to those of rank 0, `variables`.

    It uses as many threads as rank 0 does now.
    """
    folders = filter(None, (str(import_root()), variables.get("PYTHONPATH")))
    own = {"PYTHONPATH": os.pathsep.join(folders)}
    if device.type == "cuda":
        visible = variables.get("CUDA_VISIBLE_DEVICES")
        own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    elif "OMP_NUM_THREADS" not in variables:
        own["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return own


@contextmanager
def threads_for_ranks(size: int, device: torch.device) -> Generator[None]:
    """On a CPU, use a share of its cores within the context, unless the user has set a number."""
    before = torch.get_num_threads()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, before // size))
    try:
        yield
    finally:
        torch.set_num_threads(before)
