"""vLLM's routes /version and /load."""

from __future__ import annotations

import importlib.metadata

from flask import Response

from container.http.route import ALL_KINDS, Api, get
from container.http.service import Service, json_response


def version(service: Service) -> Response:
    return json_response({"version": importlib.metadata.version("longshore")})


def server_load(service: Service) -> Response:
    """Return the number of sequences that run or wait, as of the engines' last heartbeats."""
    return json_response({"server_load": service.client.num_unfinished()})


STATUS = Api(
    "vLLM",
    (
        get("/version", "Return the version of this server.", version),
        get("/load", "Return the number of sequences that run or wait.", server_load),
    ),
    kinds=ALL_KINDS,
)  # fmt: skip
