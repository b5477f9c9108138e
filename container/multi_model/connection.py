"""HTTP over a Unix socket, which lets other greenlets run while it waits."""

from __future__ import annotations

import http.client
from pathlib import Path

from gevent import socket


class UnixConnection(http.client.HTTPConnection):
    """A connection to the server behind a socket's path."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)

    def hang_up(self) -> None:
        """Ends whatever waits for the server's answer; may be called from another greenlet."""
        if self.sock is not None:
            self.sock.shutdown(socket.SHUT_RDWR)
