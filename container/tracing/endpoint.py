"""The checks of `option.otlp_traces_endpoint`, before any process starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import urlsplit

from core.errors import ConfigurationError
from core.options import Options

_PACKAGE = "opentelemetry-exporter-otlp-proto-http"


def check_traces_endpoint(options: Options) -> None:
    """Raise ConfigurationError if the endpoint is no URL, or OpenTelemetry is not installed."""
    url = options.otlp_traces_endpoint
    if url is None:
        return
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigurationError(
            f"option.otlp_traces_endpoint={url}: expected the URL of a collector that takes OTLP "
            "over HTTP, such as http://localhost:4318/v1/traces"
        )
    try:
        distribution(_PACKAGE)
    except PackageNotFoundError:
        raise ConfigurationError(
            f"option.otlp_traces_endpoint needs the package {_PACKAGE}: "
            "pip install 'longshore[otel]'"
        ) from None
