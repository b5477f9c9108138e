"""The processes of a server that already runs on this machine, found by its port."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil

FORWARDERS = frozenset(("docker-proxy", "kubectl", "rootlessport", "ssh"))
"""Programs that listen on a port and forward its connections to a server elsewhere."""


def server_processes(url: str) -> list[psutil.Process]:
    """Return the processes of the server at an address.

    These are the processes that listen on its port, their ancestors that run the same program, and
    all descendants of both.

    Returns none if the server runs on another machine, in a container or as another user, since
    its processes are not visible then. Also returns none if the server has started this process.
    """
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    if not _is_local(address.hostname or ""):
        return []
    found: dict[int, psutil.Process] = {}
    try:
        for listener in _listeners(port):
            root = _root(listener)
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
    except psutil.Error:  # a process has ended, or belongs to another user
        return []
    return list(found.values())


def _is_local(host: str) -> bool:
    try:
        infos = socket.getaddrinfo(host, None)
    except OSError:
        return False
    interfaces = psutil.net_if_addrs().values()
    ours = {address.address for addresses in interfaces for address in addresses}
    theirs = {str(info[4][0]) for info in infos}
    return any(ip in ours or ipaddress.ip_address(ip).is_loopback for ip in theirs)


def _listeners(port: int) -> Iterator[psutil.Process]:
    pids = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
    }
    for pid in pids - {None} - _load_test():
        process = psutil.Process(pid)
        if process.name() not in FORWARDERS:
            yield process


def _root(process: psutil.Process) -> psutil.Process:
    """Return the process, or its topmost ancestor that runs the same program (so not a shell)."""
    root, program = process, process.exe()
    for parent in process.parents():
        if parent.pid in _load_test() or parent.exe() != program:
            break
        root = parent
    return root


def _load_test() -> set[int]:
    """Return this process and those that started it, which may have started the server too."""
    me = psutil.Process()
    return {me.pid, *(parent.pid for parent in me.parents())}
