"""The processes of ranks 1 and up, which rank 0 commands. It starts those of its own machine."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Pipe
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it

from core.configuration.layout import quantity
from core.configuration.options import Options
from core.errors import ConfigurationError, EngineUnavailableError, LongshoreError
from core.process.names import import_root, python_command
from engine.digest import digest_model
from engine.ranks.order_types import LAUNCH, READY, FailureReport, Order, RankLaunch
from engine.ranks.orders import RemoteOrders
from engine.ranks.store import serve_store
from engine.ranks.watch import CULPRIT_S, TICK_S, RankWatch
from engine.shard import Shard

logger = logging.getLogger(__name__)

COMMAND = python_command("engine.follow")
HERE = "127.0.0.1:0"
"""The store's address if all ranks are on this machine."""
POLL_S = 0.1
JOIN_SHARE = 0.5
"""The share of option.model_loading_timeout within which all ranks must be ready to join."""
MAX_REPORT_WAIT_S = TICK_S + CULPRIT_S + 1.0
"""How long a failed collective waits for the failure report of a rank, which may explain it."""
END_S = 2.0
"""Time for a rank to end by itself, before it is killed."""


class Followers:
    """Starts the ranks of this machine, and waits for those on other nodes (option.nodes).

    If one of them is lost, logs why and kills those of this machine. Ranks on other nodes end when
    the store ends: with `close`, or with this process.
    """

    def __init__(
        self,
        model_dir: Path,
        options: Options,
        size: int,
        device: torch.device,
        on_lost: Callable[[LongshoreError], None],
        address: str = "",
        command: Sequence[str] = COMMAND,
    ) -> None:
        """on_lost: called with the error, in a thread of its own. command: starts a rank.

        address: HOST:PORT at which ranks on other nodes find rank 0.
        """
        self._size, self._nodes = size, options.layout.nodes
        self._max_wait_s = JOIN_SHARE * options.execution.model_loading_timeout
        self._on_lost = on_lost
        self._failure: LongshoreError | None = None
        self._has_failed = threading.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._remote_orders: RemoteOrders | None = None
        digest = digest_model(model_dir) if options.layout.nodes > 1 else ""
        launch = RankLaunch(version("longshore"), digest, options, size)
        self._store: TCPStore | None = serve_store(address or HERE)
        self._store.set(LAUNCH, launch.encode())
        self.address = f"{self._store.host}:{self._store.port}"
        self._local: dict[int, LocalRank] = {}
        for rank in range(1, size // options.layout.nodes):
            arguments = [*command, self.address, str(rank), str(model_dir), "--orders"]
            variables = {**os.environ, **rank_variables(rank, device, os.environ)}
            self._local[rank] = LocalRank(arguments, variables)
        processes = {rank: local.process for rank, local in self._local.items()}
        self._watch: RankWatch | None = RankWatch(self._store, size, processes, self._lose)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks on this machine."""
        return [local.process.pid for local in self._local.values()]

    def wait(self) -> None:
        """Wait until all ranks are about to join the group.

        Raises the error of a rank that fails earlier, because the group would wait for that rank.
        Raises ConfigurationError if ranks do not come.
        """
        assert self._store is not None, "closed"
        deadline = time.monotonic() + self._max_wait_s
        while missing := self._size - 1 - self._store.add(READY, 0):
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"{quantity(missing, 'rank')} did not connect to rank 0 at {self.address} "
                    f"within {self._max_wait_s:g} s; see their logs, and open all ports between "
                    "the nodes, since each start chooses other ports"
                )
            self._has_failed.wait(POLL_S)
        if self._nodes > 1:
            shard = Shard(0, self._size)
            with self.raising_cause():
                self._remote_orders = RemoteOrders(self.address, shard, self._nodes)

    @contextmanager
    def raising_cause(self) -> Generator[None]:
        """Raise `cause_of(error)` in place of an error that is raised within the context."""
        try:
            yield
        except Exception as error:
            cause = self.cause_of(error)
            if cause is error:
                raise
            raise cause from error

    def send(self, order: Order) -> int:
        """Send an order to all ranks, and return its size in bytes.

        Raises EngineUnavailableError if a rank is lost.
        """
        message = self._encode(order)
        if self._failure is not None:
            raise self._failure
        with self.raising_cause():
            for local in self._local.values():
                local.orders.send_bytes(message)
            if self._remote_orders is not None:
                self._remote_orders.send(message)
        return len(message)

    def cause_of(self, error: Exception) -> Exception:
        """Return the error to raise in place of rank 0's, which another rank may have caused."""
        if isinstance(error, LongshoreError):
            return error
        self._has_failed.wait(MAX_REPORT_WAIT_S)
        if self._failure is not None:
            return self._failure
        # The fault is rank 0's own, or a rank on another node has ended. The other ranks may wait
        # for rank 0 in a collective, so the model cannot go on.
        others = " or lost another node" if self._remote_orders is not None else ""
        return EngineUnavailableError(f"rank 0 failed{others}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the processes. May be called again."""
        if self._watch is not None:
            self._watch.stop()
        for local in self._local.values():
            local.orders.close()
        for local in self._local.values():
            local.wait()
        # Without these objects the store ends, and with it the ranks on other nodes.
        self._watch = self._store = self._remote_orders = None

    def _lose(self, rank: int, report: bytes) -> None:
        """Kill the ranks of this machine, so that rank 0 does not wait for them in a collective.

        gloo's collectives then fail, unless a machine vanished or a rank on another one hangs.
        NCCL's go on waiting, so `on_lost` has to end the process.
        """
        if report:
            error = FailureReport.decode_error(report, rank)
        elif rank in self._local:
            error = EngineUnavailableError(f"rank {rank} {self._local[rank].describe_loss()}")
        else:
            error = EngineUnavailableError(f"rank {rank} on another node ended or does not answer")
        logger.error("%s", error)
        self._failure = error
        self._has_failed.set()
        for local in self._local.values():
            local.process.kill()
        self._on_lost(error)


class LocalRank:
    """A child process. It gets its orders through a pipe, and ends when the pipe is closed."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """command: starts the rank when the pipe's file descriptor is appended to it.

        variables: the rank's environment.
        """
        theirs, self.orders = Pipe(duplex=False)
        fd = theirs.fileno()
        self.process = subprocess.Popen([*command, str(fd)], pass_fds=[fd], env=variables)
        theirs.close()

    def wait(self) -> None:
        """Wait until the process has ended. Its pipe is closed already."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def describe_loss(self) -> str:
        """Return what happened, now that the process no longer answers."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.1)
        code = self.process.poll()
        return "stopped answering" if code is None else f"ended with exit code {code}"


def rank_variables(rank: int, device: torch.device, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that rank `rank` has in addition to those of rank 0, `variables`.

    On a CPU, the rank uses as many threads as rank 0 uses now.
    """
    folders = filter(None, (str(import_root()), variables.get("PYTHONPATH")))
    added = {"PYTHONPATH": os.pathsep.join(folders)}
    if device.type == "cuda":
        visible = variables.get("CUDA_VISIBLE_DEVICES")
        added["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    elif "OMP_NUM_THREADS" not in variables:
        added["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return added


@contextmanager
def threads_for_ranks(size: int, device: torch.device) -> Generator[None]:
    """On a CPU, use a share of the threads within the context, unless OMP_NUM_THREADS is set."""
    before = torch.get_num_threads()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, before // size))
    try:
        yield
    finally:
        torch.set_num_threads(before)
