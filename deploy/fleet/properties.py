"""The properties of the replicas."""

from __future__ import annotations

import os
from pathlib import Path

from container.configuration.resolve import load_configuration
from core.configuration.options import Options
from core.errors import ConfigurationError


def read_options(properties: Path) -> Options:
    """Return the options of the replicas, from their properties and this machine's environment.

    Raises ConfigurationError if a container or a fleet could not start with them.
    """
    if not properties.is_file():
        raise ConfigurationError(f"--properties {properties}: no such file")
    options = load_configuration(properties, os.environ).options
    if options.server.ssl_certfile is not None:
        raise ConfigurationError(
            "option.ssl_certfile: the nodes of a fleet speak HTTP; remove it, and end HTTPS at the "
            "load balancer in front of them"
        )
    return options
