"""TCP connections between ranks of different machines. Both ends prove that they know the key.

```
another rank                           rank 0
                                   <-  magic, nonce
  magic, nonce, digest, channel    ->
                                   <-  digest
```

A digest is an HMAC of the sender's role and both nonces. All fields have fixed sizes, so different
inputs never give the HMAC the same bytes. The key itself is never sent, and nothing is
encrypted: use a private network.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

from core.configuration.meeting_point import KEY_VARIABLE, MeetingPoint
from core.errors import ConfigurationError

HANDSHAKE_S = 5.0
"""Time for the other end to prove that it knows the key, counted from the connection."""
CONNECT_S = 5.0
TRY_AGAIN_S = 0.5
_MAGIC = b"longshore rank 1"
_GREETING = struct.Struct("16s32s")
_PROOF = struct.Struct("16s32s32s32s?")
_DIGEST_BYTES = 32
_RANK_0, _OTHER = b"rank 0", b"a rank"
"""The roles, of equal length."""
_SIOCGIFADDR = 0x8915


class WrongKeyError(ConfigurationError):
    """The other end has another key."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One of a rank's two connections to rank 0."""

    connection: Connection
    rank: bytes
    """Random bytes that name the rank, the same for both of its connections."""
    is_beats: bool
    """Whether the connection carries beats; otherwise it carries orders."""


class Candidate:
    """A connection that rank 0 has accepted, and whose other end may be a rank."""

    def __init__(self, end: socket.socket, host: str) -> None:
        """host: the other end's address."""
        self.end, self.host = end, host
        self.deadline = time.monotonic() + HANDSHAKE_S
        _prepare(end)
        end.setblocking(False)
        self._nonce = os.urandom(32)
        self._received = b""
        end.send(_GREETING.pack(_MAGIC, self._nonce))  # the buffer is empty, so all is sent

    def read(self, key: bytes) -> Channel | None:
        """Read what has arrived. Return the channel once the other end has proven the key.

        Raises WrongKeyError if the other end has another key, and OSError or EOFError if the other
        end is not a rank, or has gone.
        """
        part = self.end.recv(_PROOF.size - len(self._received))
        if not part:
            raise EOFError("it was closed")
        self._received += part
        if not _MAGIC.startswith(self._received[: len(_MAGIC)]):
            raise OSError(errno.EPROTO, "it speaks another protocol")
        if len(self._received) < _PROOF.size:
            return None
        _, nonce, digest, rank, is_beats = _PROOF.unpack(self._received)
        self.end.send(_digest(key, _RANK_0, self._nonce, nonce))
        _require_key(digest, _digest(key, _OTHER, nonce, self._nonce), _OTHER)
        return Channel(_connection(self.end), rank, is_beats)


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine; port 0: any. Raises OSError if that is impossible."""
    family, address = _resolve(host, port)
    return socket.create_server(address, family=family, backlog=128)


def accept(listener: socket.socket) -> Candidate:
    """Accept a connection. Raises OSError if it has gone."""
    end, (host, *_) = listener.accept()
    try:
        return Candidate(end, host)
    except BaseException:
        end.close()
        raise


def join(place: MeetingPoint, on_wait: Callable[[str], None]) -> tuple[Connection, Connection]:
    """Connect to rank 0; return the connections of orders and of beats.

    Waits without a limit: whoever started this process ends it. on_wait: called with every new
    reason why rank 0 cannot be joined yet.

    Raises WrongKeyError if rank 0 has another key.
    """
    reasons = set[str]()
    while True:
        try:
            return _join_once(place)
        except (OSError, EOFError) as error:  # rank 0 may have enough ranks, or have ended
            reason = str(error) or type(error).__name__
            if reason not in reasons:
                reasons.add(reason)
                on_wait(reason)
        time.sleep(TRY_AGAIN_S)


def _join_once(place: MeetingPoint) -> tuple[Connection, Connection]:
    rank = os.urandom(32)
    orders = _connect(place, rank, is_beats=False)
    try:
        return orders, _connect(place, rank, is_beats=True)
    except BaseException:
        orders.close()
        raise


def _connect(place: MeetingPoint, rank: bytes, *, is_beats: bool) -> Connection:
    with socket.create_connection((place.host, place.port), timeout=CONNECT_S) as end:
        deadline = time.monotonic() + HANDSHAKE_S
        _prepare(end)
        magic, theirs = _GREETING.unpack(_receive(end, _GREETING.size, deadline))
        if magic != _MAGIC:
            raise OSError(errno.EPROTO, "the peer speaks another protocol")
        ours = os.urandom(32)
        proof = _digest(place.key, _OTHER, ours, theirs)
        end.sendall(_PROOF.pack(_MAGIC, ours, proof, rank, is_beats))
        digest = _receive(end, _DIGEST_BYTES, deadline)
        _require_key(digest, _digest(place.key, _RANK_0, theirs, ours), _RANK_0)
        return _connection(end)


def _receive(end: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        end.settimeout(max(deadline - time.monotonic(), 0.001))
        part = end.recv(size - len(received))
        if not part:
            raise EOFError("rank 0 closed the connection")
        received += part
    return received


def _digest(key: bytes, role: bytes, own_nonce: bytes, other_nonce: bytes) -> bytes:
    return hmac.digest(key, role + own_nonce + other_nonce, "sha256")


def _require_key(digest: bytes, expected: bytes, role: bytes) -> None:
    if not hmac.compare_digest(digest, expected):
        raise WrongKeyError(f"{role.decode()} has another key; set {KEY_VARIABLE} to the same key")


def _connection(end: socket.socket) -> Connection:
    """Turn a socket into a connection without time limits."""
    end.settimeout(None)
    return Connection(end.detach())


def _prepare(end: socket.socket) -> None:
    """Send messages without delay, and have the kernel probe an idle peer (TCP keep-alive).

    Until the launch, no watch checks the peer.
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut(connection: Connection) -> None:
    """End a connection for both ends, even while other threads use it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def local_interface(connection: Connection) -> str:
    """Return the network interface that a connection of this machine goes through, or ''."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        return interface_of(end.getsockname()[0])


def interface_at(place: MeetingPoint) -> str:
    """Return the network interface that has the address of a meeting point, or ''."""
    return interface_of(_resolve(place.host, place.port)[1][0])


def interface_of(address: str) -> str:
    """Return the network interface whose primary IPv4 address this is, or '' if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """Return the family of a host's first address, and the address."""
    [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return family, cast(tuple[str, int], address[:2])
