"""LMI's and SageMaker's routes for LoRA adapters: load, list, unload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flask import Flask, Response, request

from container.http.request_context import request_context
from container.http.service import Service, json_response
from container.schema.fields import Field, Fields, read_fields
from container.schema.kinds import BOOLEAN, STRING, with_schema
from core.adapter import Adapter
from core.errors import NotFoundError, RequestError
from core.source_roots import source_roots

MAX_NAME = 256

_NAME = with_schema(STRING, {"minLength": 1, "maxLength": MAX_NAME})
_SRC = with_schema(STRING, {"minLength": 1})
_BOOLEANS = {"true": True, "false": False}

ADAPTER_FIELDS: Fields = {
    "name": Field(_NAME, "The name by which requests select the adapter."),
    "src": Field(_SRC, "The adapter's directory, in PEFT's format."),
    "preload": Field(BOOLEAN, "Ignored: every adapter is loaded immediately."),
    "pin": Field(BOOLEAN, "Ignored: every adapter stays loaded until it is unloaded."),
}


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """An adapter to load."""

    name: str
    src: str


def read_adapter_request(body: Mapping[str, object]) -> AdapterRequest:
    """Validate a request to load an adapter. Raises RequestError naming the first bad field."""
    values = read_fields(body, ADAPTER_FIELDS)
    name, src = values.get("name", ""), values.get("src", "")
    if not 0 < len(name) <= MAX_NAME:
        raise RequestError("name", f"expected a string of 1 to {MAX_NAME} characters")
    if not src:
        raise RequestError("src", "expected the adapter's directory")
    return AdapterRequest(name, src)


class AdapterRoutes:
    """The routes for adapters of the only model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: Flask) -> None:
        """Add the routes to the app."""
        app.add_url_rule("/adapters", view_func=self.adapters)
        app.add_url_rule("/adapters", view_func=self.load, methods=["POST"])
        app.add_url_rule("/adapters/<path:name>", view_func=self.adapter)
        app.add_url_rule("/adapters/<path:name>", view_func=self.unload, methods=["DELETE"])

    def adapters(self) -> Response:
        """List the loaded adapters."""
        self._require_lora()
        return json_response({"adapters": list(map(_described, self._service.client.adapters))})

    def adapter(self, name: str) -> Response:
        """Describe one adapter."""
        self._require_lora()
        for adapter in self._service.client.adapters:
            if adapter.name == name:
                return json_response(_described(adapter))
        raise NotFoundError(f"no adapter '{name}' is loaded")

    def load(self) -> Response:
        """Load an adapter while requests run.

        Reads the fields from the query string, if there is one, as DJL Serving does; else from the
        body.
        """
        self._require_lora()
        context = request_context()
        query = {name: _BOOLEANS.get(value, value) for name, value in request.args.items()}
        adapter = read_adapter_request(query or context.json_fields())
        if adapter.name == self._service.model_name:
            raise RequestError("name", "is the model's own name; choose another")
        self._require_allowed(adapter.src)
        reply = self._service.client.load_adapter(adapter.name, adapter.src)
        self._service.wait_for(context, reply)
        return json_response({"status": f"Adapter {adapter.name} registered"})

    def unload(self, name: str) -> Response:
        """Unload an adapter. Requests that already use it run to their end."""
        self._require_lora()
        reply = self._service.client.unload_adapter(name)
        self._service.wait_for(request_context(), reply)
        return json_response({"status": f"Adapter {name} unregistered"})

    def _require_allowed(self, src: str) -> None:
        options, model_dir = self._service.options, Path(self._service.client.facts.model)
        own = [model_dir, *([model_dir / options.adapters] if options.adapters else [])]
        source_roots(options, own).require(src, "src")

    def _require_lora(self) -> None:
        if not self._service.options.enable_lora:
            raise RequestError("adapters", "needs option.enable_lora=true")


def _described(adapter: Adapter) -> dict[str, object]:
    return {"name": adapter.name, "src": adapter.src, "preload": True, "pin": True}
