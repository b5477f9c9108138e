"""vLLM's routes /version and /load."""

from __future__ import annotations

import importlib.metadata

from flask import Flask, Response

from container.http.service import Service, json_response


class StatusRoutes:
    """The routes that tell clients the server's version and how busy it is."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: Flask) -> None:
        app.add_url_rule("/version", view_func=self.version)
        app.add_url_rule("/load", view_func=self.server_load)

    def version(self) -> Response:
        return json_response({"version": importlib.metadata.version("longshore")})

    def server_load(self) -> Response:
        """Return the number of sequences that run or wait, as of the engines' last heartbeats."""
        return json_response({"server_load": self._service.client.num_unfinished()})
