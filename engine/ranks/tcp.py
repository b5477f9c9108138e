"""TCP connections between ranks of different machines, whose ends prove that they know one key.

The key itself is never sent, and nothing is encrypted: use a private network.
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
from multiprocessing.connection import Connection

import msgspec

from core.errors import ConfigurationError
from core.ranks import KEY_VARIABLE, MeetingPoint

HANDSHAKE_S = 5.0
"""Time for the other end to prove that it knows the key."""
CONNECT_S = 5.0
TRY_AGAIN_S = 0.5
_NONCE_BYTES = 32
_SIOCGIFADDR = 0x8915


class WrongKeyError(ConfigurationError):
    """The other end has another key."""


class Hello(msgspec.Struct, frozen=True):
    """The first message on each of a rank's two connections."""

    rank: bytes
    """Random, and the same on both."""
    is_beats: bool
    """Whether it is the connection of the beats, or that of the orders."""


def listen(place: MeetingPoint) -> socket.socket:
    """Listen at an address of this machine. Raises ConfigurationError if that is impossible."""
    try:
        family, _, _, _, address = _resolve(place)
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ConfigurationError(
            f"option.rank_address={place}: {error.strerror}; it must be an address of this "
            "machine, and a port that is free"
        ) from error


def accept(listener: socket.socket, key: bytes) -> tuple[Connection, Hello, str]:
    """Accept a connection. Return it with its first message and the other end's address.

    Raises WrongKeyError, and OSError or EOFError if the other end is no rank, or has gone.
    """
    accepted, (host, *_) = listener.accept()
    connection = _authenticated(accepted, key, b"rank 0", b"rank")
    try:
        hello = msgspec.msgpack.decode(connection.recv_bytes(_NONCE_BYTES * 2), type=Hello)
    except BaseException as error:
        connection.close()
        if isinstance(error, msgspec.MsgspecError):
            raise OSError(errno.EPROTO, str(error)) from error
        raise
    return connection, hello, host


def join(place: MeetingPoint, on_wait: Callable[[], None]) -> tuple[Connection, Connection]:
    """Connect to rank 0; return the connections of orders and of beats.

    Waits for rank 0 for ever: whoever started this process knows when to end it. on_wait: called
    once if rank 0 does not listen yet.

    Raises WrongKeyError.
    """
    has_waited = False
    while True:
        # Rank 0 may have its ranks already, or end in between.
        with contextlib.suppress(OSError, EOFError):
            return _join_once(place)
        if not has_waited:
            has_waited = True
            on_wait()
        time.sleep(TRY_AGAIN_S)


def _join_once(place: MeetingPoint) -> tuple[Connection, Connection]:
    rank = os.urandom(_NONCE_BYTES)
    orders = _connect(place, Hello(rank, is_beats=False))
    try:
        return orders, _connect(place, Hello(rank, is_beats=True))
    except BaseException:
        orders.close()
        raise


def _connect(place: MeetingPoint, hello: Hello) -> Connection:
    connected = socket.create_connection((place.host, place.port), timeout=CONNECT_S)
    connected.settimeout(None)
    connection = _authenticated(connected, place.key, b"rank", b"rank 0")
    connection.send_bytes(msgspec.msgpack.encode(hello))
    return connection


def _authenticated(end: socket.socket, key: bytes, role: bytes, peer: bytes) -> Connection:
    """Return a connection on this socket, if its other end knows the key. Closes the socket.

    Each end sends a random number, and then a digest of its role and of both numbers.
    """
    with end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_dead_machines(end)
        _limit_waits(end, HANDSHAKE_S)
        connection = Connection(os.dup(end.fileno()))
        try:
            ours = os.urandom(_NONCE_BYTES)
            connection.send_bytes(ours)
            theirs = connection.recv_bytes(_NONCE_BYTES)
            connection.send_bytes(_digest(key, role, ours, theirs))
            digest = connection.recv_bytes(_NONCE_BYTES)
            if not hmac.compare_digest(digest, _digest(key, peer, theirs, ours)):
                raise WrongKeyError(f"{peer.decode()} has another key; set {KEY_VARIABLE} alike")
        except BaseException:
            connection.close()
            raise
        _limit_waits(end, 0)
        return connection


def _digest(key: bytes, role: bytes, ours: bytes, theirs: bytes) -> bytes:
    return hmac.digest(key, role + ours + theirs, "sha256")


def _limit_waits(end: socket.socket, seconds: float) -> None:
    """Have reads and writes fail after some seconds; 0: never."""
    limit = struct.pack("ll", int(seconds), 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _notice_dead_machines(end: socket.socket) -> None:
    """Have the kernel ask an idle peer for a sign of life: before the launch, no watch does."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut(connection: Connection) -> None:
    """End a connection for both ends, also while other threads use it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def local_interface(connection: Connection) -> str:
    """Return the network interface that a connection of this machine goes through, or ''."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        return interface_of(end.getsockname()[0])


def interface_at(place: MeetingPoint) -> str:
    """Return the network interface that has the address of a meeting point, or ''."""
    return interface_of(_resolve(place)[4][0])


def interface_of(address: str) -> str:
    """Return the network interface with an IPv4 address, or '' if it is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _resolve(place: MeetingPoint) -> tuple[int, int, int, str, tuple[str, int]]:
    [first, *_] = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    return first  # pyright: ignore[reportReturnType] - an address of IPv6 has two numbers more
