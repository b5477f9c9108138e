"""Deploys a fleet to a Ray cluster, and ends it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from urllib.error import HTTPError, URLError

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from core.errors import ConfigurationError
from deploy.fleet.application import NAME, QUIET, Fleet, application
from deploy.fleet.arguments import DEFAULT_PORT
from deploy.fleet.span import span_of

_POLL_INTERVAL_S = 0.1
_KEEPALIVE_S = 75
"""Longer than load balancers keep idle connections, so they never use one that is closing."""


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster. Raises ConfigurationError if there is none at the address."""
    address = address or "auto"
    try:
        try:
            ray.init(address=address, namespace=NAME, log_to_driver=True)
        except ConnectionError as error:
            raise ConfigurationError(
                f"--address {address}: {error}; start a cluster with `ray start`, or try "
                "--local-nodes"
            ) from None
        yield
    finally:
        ray.shutdown()  # also if a signal ends ray.init: a cluster with a client cannot end


def deploy(fleet: Fleet, port: int | None) -> None:
    """Start the fleet, or update the one that runs; return when all replicas are ready.

    port: TCP port of every node. It cannot change while the fleet runs. Raises ConfigurationError
    if the cluster cannot hold a replica, or replicas do not start.
    """
    is_update = is_running()
    if not is_update:
        _start_serve(port or DEFAULT_PORT)
    elif port is not None:
        raise ConfigurationError(
            f"--port {port}: a fleet is running, and its port cannot be changed"
        )
    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    span = span_of(fleet.options, gpus)
    if span.bundles > 1:
        print(f"each replica takes {span}", flush=True)
    try:
        serve.run(application(fleet, span, len(nodes)), name=NAME, route_prefix="/")
    except RuntimeError as error:
        # Serve keeps the running replicas, but does not replace one that ends.
        cure = "; deploy the former properties again: replicas that end are not replaced until then"
        raise ConfigurationError(f"{error} The log says why{cure if is_update else ''}") from None


def is_running() -> bool:
    """Return whether the cluster has a fleet."""
    return NAME in serve.status().applications


def wait_for_route(port: int) -> None:
    """Wait until this machine's proxy knows the fleet, which it hears of after `deploy` returns."""
    while True:
        with suppress(URLError):  # it does not listen yet
            try:
                urllib.request.urlopen(f"http://localhost:{port}/ping").close()
                return
            except HTTPError as error:
                if error.code != HTTPStatus.NOT_FOUND:
                    return
        time.sleep(_POLL_INTERVAL_S)


def end() -> None:
    """End the fleet and Serve. Raises ConfigurationError if there is no fleet."""
    if not is_running():
        raise ConfigurationError("no fleet runs on this cluster")
    serve.shutdown()


def _start_serve(port: int) -> None:
    options = HTTPOptions(host="0.0.0.0", port=port, keep_alive_timeout_s=_KEEPALIVE_S)
    serve.start(proxy_location="EveryNode", http_options=options, logging_config=QUIET)
