"""Ranks 1 and up, as rank 0 sees them: its child processes, and processes of other machines."""

from __future__ import annotations

import contextlib
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe

from engine.ranks.tcp import shut

END_S = 2.0
"""Time for a rank to end by itself, before it is killed."""


class Peer(ABC):
    """A rank other than this process."""

    orders: Connection
    beats: Connection

    @abstractmethod
    def kill(self) -> None:
        """End the rank. Other threads may be using its connections."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the rank has ended. Its connections are closed already."""

    @abstractmethod
    def describe_loss(self) -> str:
        """Return what happened to a rank that no longer answers."""

    def close(self) -> None:
        """Close the connections, which ends the rank."""
        self.orders.close()
        self.beats.close()


class LocalRank(Peer):
    """A child process, connected by pipes."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """command: starts the rank when the rank's two file descriptors are appended to it.

        variables: the rank's environment.
        """
        self.orders, their_orders = Pipe()
        self.beats, their_beats = Pipe()
        fds = their_orders.fileno(), their_beats.fileno()
        self._process = subprocess.Popen([*command, *map(str, fds)], pass_fds=fds, env=variables)
        their_orders.close()
        their_beats.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def describe_loss(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)
        code = self._process.poll()
        return "stopped answering" if code is None else f"ended with exit code {code}"


class JoinedRank(Peer):
    """A process of another machine, connected by TCP. It ends when rank 0 closes the connection."""

    def __init__(self, orders: Connection, beats: Connection, host: str) -> None:
        """host: the other machine's address."""
        self.orders, self.beats, self.host = orders, beats, host

    @property
    def has_left(self) -> bool:
        """Whether the process has ended. Valid only before the launch, while it sends nothing."""
        return self.beats.poll()

    def kill(self) -> None:
        shut(self.orders)
        shut(self.beats)

    def wait(self) -> None:
        pass

    def describe_loss(self) -> str:
        return f"on {self.host} ended, or its machine stopped answering"
