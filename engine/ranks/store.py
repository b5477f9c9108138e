"""The store of torch.distributed, in the process of rank 0, through which ranks find each other.

It asks nobody for a key, so it listens at one address only: at 127.0.0.1 or, in a fleet, at the
address of rank 0's node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Generator
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it

from core.errors import ConfigurationError

FOREVER = timedelta(days=365)
OPEN = timedelta(seconds=30)
"""Time to connect to a store that is open."""
LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915


def serve_store(address: str) -> TCPStore:
    """Open the store at an address of this machine, HOST:PORT. Port 0: any port that is free.

    Raises ConfigurationError if that is impossible.
    """
    host, port = _split(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"the ranks' store cannot listen at {address}: {error.strerror}"
        ) from error
    # By default, the store would listen at all addresses.
    port, fd = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def open_store(address: str, limit: timedelta = OPEN) -> TCPStore:
    """Connect to the store, once it is open. Raises RuntimeError if that takes too long."""
    host, port = _split(address)
    store = TCPStore(host, port, is_master=False, timeout=limit)
    store.set_timeout(FOREVER)  # for what a rank waits for in the store
    return store


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def network_of(address: str) -> Generator[None]:
    """Have gloo and NCCL use the network interface that leads to the store.

    Does not change what the user has set. By default, gloo would take the interface that has the
    address of the host name, which may fail or be one that other nodes cannot reach.
    """
    name = interface_towards(_split(address)[0])
    variables = {"GLOO_SOCKET_IFNAME": name}
    if name != LOOPBACK:  # on one machine, NCCL needs no network
        variables["NCCL_SOCKET_IFNAME"] = f"={name}"  # without `=`, it would be a prefix
    added = variables.keys() - os.environ.keys() if name else set[str]()
    os.environ.update((variable, variables[variable]) for variable in added)
    try:
        yield
    finally:
        for variable in added:
            del os.environ[variable]


def interface_towards(host: str) -> str:
    """Return the interface through which this machine reaches an IPv4 address, or ''."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        with contextlib.suppress(OSError):
            any_socket.connect((host, 1))  # sends nothing
        own_address = any_socket.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == own_address:
                    return name
    return ""
