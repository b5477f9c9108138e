"""LMI's and SageMaker's routes for LoRA adapters: load, list, unload."""

from __future__ import annotations

from flask import Flask, Response, request

from container.apis.adapters.schema import read_adapter_request
from container.http.host import Host, json_response
from core.adapter import Adapter
from core.errors import NotFoundError, RequestError

_TRUTH = {"true": True, "false": False}


class AdapterRoutes:
    """The adapters of the one model."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        app.add_url_rule("/adapters", view_func=self.adapters)
        app.add_url_rule("/adapters", view_func=self.load, methods=["POST"])
        app.add_url_rule("/adapters/<path:name>", view_func=self.adapter)
        app.add_url_rule("/adapters/<path:name>", view_func=self.unload, methods=["DELETE"])

    def adapters(self) -> Response:
        """All that are loaded."""
        self._require_lora()
        return json_response({"adapters": list(map(_described, self._host.client.adapters))})

    def adapter(self, name: str) -> Response:
        """One of them."""
        self._require_lora()
        for each in self._host.client.adapters:
            if each.name == name:
                return json_response(_described(each))
        raise NotFoundError(f"no adapter '{name}' is loaded")

    def load(self) -> Response:
        """Loads one, while requests run. DJL Serving takes the fields as a query, too."""
        self._require_lora()
        query = {name: _TRUTH.get(value, value) for name, value in request.args.items()}
        asked = read_adapter_request(query or self._host.read_json())
        if asked.name == self._host.model_name:
            raise RequestError("name", "is the model's own; choose another")
        self._host.wait_for(self._host.client.load_adapter(asked.name, asked.src))
        return json_response({"status": f"Adapter {asked.name} registered"})

    def unload(self, name: str) -> Response:
        """Unloads one; requests that run with it end as they would."""
        self._require_lora()
        self._host.wait_for(self._host.client.unload_adapter(name))
        return json_response({"status": f"Adapter {name} unregistered"})

    def _require_lora(self) -> None:
        if not self._host.options.enable_lora:
            raise RequestError("adapters", "needs option.enable_lora=true")


def _described(adapter: Adapter) -> dict[str, object]:
    return {"name": adapter.name, "src": adapter.src, "preload": True, "pin": True}
