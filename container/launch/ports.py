"""The TCP port: where a server listens, and whether it can."""

from __future__ import annotations

import ipaddress
import socket

from core.errors import ConfigurationError

BACKLOG = 2048
_MAPPED = "::ffff:"


def bind_port(port: int, host: str = "") -> socket.socket:
    """Return a socket that is bound to a port, but does not listen yet.

    host: an IP address of this machine. If empty, the socket is bound to all its addresses, of IPv4
    and IPv6, or of IPv4 alone where there is no IPv6.

    Raises ConfigurationError if the port is invalid or already in use, or the host is wrong.
    """
    if not 0 < port < 65536:
        raise ConfigurationError(f"port {port}: must be 1 to 65535")
    address = _ip_address(host)
    is_ipv6 = ":" in address
    bound = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:  # Linux' default can be to take no clients of IPv4
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, port))
    except OSError as error:
        bound.close()
        place = f"--host {host}, port {port}" if host else f"port {port}"
        raise ConfigurationError(f"{place}: {error.strerror}; choose another with --port") from None
    return bound


def require_free_port(port: int, host: str = "") -> None:
    """Raise ConfigurationError as `bind_port` does."""
    bind_port(port, host).close()


def listen(port: int, host: str = "") -> socket.socket:
    """Return a socket that listens at a port. Raises ConfigurationError as `bind_port` does."""
    listening = bind_port(port, host)
    listening.listen(BACKLOG)
    return listening


def client_address(address: tuple[str, ...]) -> tuple[str, ...]:
    """Return the address of a client as IPv4 has it, if the client uses IPv4.

    A socket for both gives the clients of IPv4 addresses of IPv6, such as ::ffff:10.0.0.1.
    """
    if address and address[0].startswith(_MAPPED):
        return (address[0].removeprefix(_MAPPED), *address[1:2])
    return address


def _ip_address(host: str) -> str:
    if not host:
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigurationError(
            f"--host {host}: expected an IP address, such as 127.0.0.1, ::1 or ::"
        ) from None
    return host
