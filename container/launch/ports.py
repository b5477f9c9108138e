"""Checks the TCP port before anything slow begins."""

from __future__ import annotations

import socket

from core.errors import ConfigurationError


def require_free_port(port: int) -> None:
    """Raise ConfigurationError if the port is invalid or already in use."""
    if not 0 < port < 65536:
        raise ConfigurationError(f"port {port}: must be 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            raise ConfigurationError(
                f"port {port}: {error.strerror}; choose another with --port"
            ) from None
