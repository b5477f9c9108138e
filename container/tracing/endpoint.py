"""The checks of `option.otlp_traces_endpoint`, before any process starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import urlsplit

from core.configuration.options import ServerOptions
from core.errors import ConfigurationError

_PACKAGE = "opentelemetry-exporter-otlp-proto-http"


def check_traces_endpoint(server: ServerOptions, source: str = "") -> None:
    """Raise ConfigurationError if the endpoint is not a URL, or OpenTelemetry is not installed.

    source: where the option is set, for the error message.
    """
    url = server.otlp_traces_endpoint
    if url is None:
        return
    where = f"{source}: " if source else ""
    if not _is_http(url):
        raise ConfigurationError(
            f"{where}option.otlp_traces_endpoint={url}: expected the URL of a collector that takes "
            "OTLP over HTTP, such as http://localhost:4318/v1/traces"
        )
    try:
        distribution(_PACKAGE)
    except PackageNotFoundError:
        raise ConfigurationError(
            f"{where}option.otlp_traces_endpoint needs the package {_PACKAGE}: install it "
            "(pip install 'longshore[otel]'), or leave the option out to go without traces"
        ) from None


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # such as half of an IPv6 address
        return False
