"""The processes of ranks 1 and up, which rank 0 starts, commands and ends."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from core.configuration.meeting_point import meeting_point
from core.configuration.options import Options
from core.errors import EngineUnavailableError, LongshoreError
from core.process.names import import_root, python_command
from engine.ranks.digest import digest_model
from engine.ranks.group import StoreServer
from engine.ranks.joining import wait_for_ranks
from engine.ranks.messages import FailureReport, GroupAddress, Order, RankLaunch
from engine.ranks.peers import JoinedRank, LocalRank, Peer
from engine.ranks.tcp import interface_at, listen
from engine.ranks.watch import CULPRIT_S, Watch

logger = logging.getLogger(__name__)

COMMAND = python_command("engine.follow")
POLL_S = 0.1
JOIN_SHARE = 0.5
"""The share of option.model_loading_timeout within which the ranks of other machines must join."""
MAX_REPORT_WAIT_S = CULPRIT_S + 1.0
"""How long a failed collective waits for the failure report of a rank, which may explain it."""


class Followers:
    """Starts the ranks of this machine and waits for other machines' ranks (option.nodes).

    If one of them is lost, logs why and kills all of them.
    """

    def __init__(
        self,
        model_dir: Path,
        options: Options,
        size: int,
        device: torch.device,
        on_lost: Callable[[LongshoreError], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """on_lost: called with the error, in a thread of its own. command: starts a rank.

        Raises ConfigurationError if ranks of other machines do not join.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._on_lost = on_lost
        self._failure: LongshoreError | None = None
        self._has_failed = threading.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._watch: Watch | None = None
        self._peers: list[Peer] = []
        num_local = size // options.nodes
        try:
            # Other machines first: local ranks expect beats as soon as they have started.
            self._peers += self._wait_for_others(model_dir, options, size - num_local, device)
            for rank in range(1, num_local):
                variables = {**os.environ, **rank_variables(rank, device, os.environ)}
                self._peers.insert(rank - 1, LocalRank(command, variables))
            for rank, peer in enumerate(self._peers, 1):
                launch = RankLaunch(
                    version=version("longshore"),
                    model_digest=self._model_digest,
                    model_dir=str(model_dir),
                    options=options,
                    rank=rank,
                    size=size,
                    address=self.address,
                )
                self._launch(rank, peer, launch)
        except BaseException:
            self.close()
            raise
        beats = {rank: peer.beats for rank, peer in enumerate(self._peers, 1)}
        self._watch = Watch(beats, self._lose)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks on this machine."""
        return [peer.pid for peer in self._peers if isinstance(peer, LocalRank)]

    def wait(self) -> None:
        """Wait until all ranks are about to join the group.

        Raises the error of a rank that fails earlier, because the group would wait for that rank.
        """
        for peer in self._peers:
            with self.raising_cause():
                while not peer.orders.poll(POLL_S):
                    if self._failure is not None:
                        raise self._failure
                peer.orders.recv_bytes()

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
            for peer in self._peers:
                peer.orders.send_bytes(message)
        return len(message)

    def cause_of(self, error: Exception) -> Exception:
        """Return the error to raise in place of rank 0's, which another rank may have caused."""
        if isinstance(error, LongshoreError):
            return error
        self._has_failed.wait(MAX_REPORT_WAIT_S)
        if self._failure is not None:
            return self._failure
        # The fault is rank 0's own. The other ranks may wait for it in a collective, so the model
        # cannot go on.
        return EngineUnavailableError(f"rank 0 failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the processes. May be called again."""
        if self._watch is not None:
            self._watch.stop()
        for peer in self._peers:
            peer.close()
        for peer in self._peers:
            peer.wait()
        self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self, rank: int, peer: Peer, launch: RankLaunch) -> None:
        try:
            peer.orders.send_bytes(self._encode(launch))
        except OSError:
            raise EngineUnavailableError(f"rank {rank} {peer.describe_loss()}") from None

    def _wait_for_others(
        self, model_dir: Path, options: Options, count: int, device: torch.device
    ) -> list[JoinedRank]:
        """Wait for the ranks of other machines, if any, and choose how all find each other."""
        timeout_s = float(options.model_loading_timeout)
        self._server: StoreServer | None = None
        self._model_digest = ""
        if options.nodes == 1:
            # By default, gloo looks up the host name. That may fail in a container without network.
            interface = "lo" if device.type == "cpu" else ""
            self.address = GroupAddress(str(self._folder / "store"), "", interface, timeout_s)
            return []
        place = meeting_point(options)
        self._model_digest = digest_model(model_dir)
        joined = wait_for_ranks(place, count, timeout_s * JOIN_SHARE)
        self._server = StoreServer(place.host, listen(place.host, 0))
        self.address = GroupAddress(self._server.port, place.host, interface_at(place), timeout_s)
        return joined

    def _lose(self, rank: int, report: bytes) -> None:
        """Kill all ranks, so that rank 0 does not wait for them in a collective.

        gloo's collectives then fail, unless a machine vanished. NCCL's go on waiting, so `on_lost`
        has to end the process.
        """
        if report:
            error = FailureReport.decode_error(report, rank)
        else:
            how = self._peers[rank - 1].describe_loss()
            error = EngineUnavailableError(f"rank {rank} {how}")
        logger.error("%s", error)
        self._failure = error
        self._has_failed.set()
        for peer in self._peers:
            peer.kill()
        self._on_lost(error)


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
