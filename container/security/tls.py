"""The server's TLS certificate: `option.ssl_certfile` and `option.ssl_keyfile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core.configuration.options import ServerOptions
from core.errors import ConfigurationError

if TYPE_CHECKING:
    from gevent.ssl import SSLContext

HANDSHAKE_S = 10.0
"""Time for a client to complete the handshake."""


def tls_context(server: ServerOptions) -> SSLContext | None:
    """Return the context of a server with the configured certificate, for gevent's sockets;
    None if no certificate is configured.

    Raises ConfigurationError if only one of the files is given, or one cannot be used.
    """
    certificate, key = server.ssl_certfile, server.ssl_keyfile
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing = "ssl_certfile" if certificate is None else "ssl_keyfile"
        raise ConfigurationError(f"option.{missing} is missing: TLS needs a certificate and a key")
    _require_readable(certificate, "ssl_certfile")
    _require_readable(key, "ssl_keyfile")
    from gevent import ssl  # lazy: most servers have no certificate, and `serve` checks them all

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password given here, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"option.ssl_certfile={certificate} and option.ssl_keyfile={key} cannot be used "
            f"({error}): both must be PEM files, and the key must belong to the certificate and "
            "have no password"
        ) from None
    return context


def shake_hands(client: Any, context: Any) -> Any | None:
    """Return the TLS connection with a client that has connected.

    If the client does not speak TLS, or not in time, closes its connection and returns None.
    """
    import gevent

    is_done = False
    try:
        with gevent.Timeout(HANDSHAKE_S, False):  # pyright: ignore[reportArgumentType]
            # If `wrap_socket` shook hands itself, there would be nothing to close after a timeout.
            client = context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
            client.do_handshake()
            is_done = True
    except OSError:
        pass
    finally:
        if not is_done:
            client.close()
    return client if is_done else None


def _require_readable(path: str, option: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"option.{option}={path}: cannot be read: {error.strerror}"
        ) from None
