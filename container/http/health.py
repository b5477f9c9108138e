"""The paths that tell whether the model can answer.

Requests to most other paths wait a moment until it can.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from flask import Flask, request

if TYPE_CHECKING:
    from container.wire.engine_client import EngineClient

HEALTH_PATHS = ("/ping", "/health", "/health/live", "/health/ready")
"""SageMaker's path, other servers' path and those of Kubernetes' probes. All answer alike."""
MAX_WAIT_S = 2.0
"""How long a request waits. A worker connects to a ready engine within about a second."""


def register_engine_wait(
    app: Flask, client: EngineClient, exempt_endpoints: Collection[str]
) -> None:
    """Let requests wait for an engine for up to MAX_WAIT_S before they fail with 503.

    One worker may have answered /ping with 200 while another is still connecting to the engine. A
    client that has got the 200 should not get a 503 from the other worker.

    exempt_endpoints: Flask's names of routes that do not wait. HEALTH_PATHS do not wait either.
    """

    def wait() -> None:
        if request.path not in HEALTH_PATHS and request.endpoint not in exempt_endpoints:
            client.wait_until_ready(MAX_WAIT_S)

    app.before_request(wait)
