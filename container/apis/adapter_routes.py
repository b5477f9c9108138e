"""The routes for LoRA adapters: LMI's and SageMaker's, and vLLM's two."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flask import Flask, Response, request

from container.http.request_context import RequestContext, request_context
from container.http.service import Service, json_response
from container.schema.fields import (
    MODEL_IGNORED,
    Field,
    Fields,
    Values,
    ignored,
    read_fields,
    unsupported,
)
from container.schema.kinds import BOOLEAN, STRING, with_schema
from container.security.source_roots import source_roots
from core.adapter import Adapter, lora_disabled
from core.errors import NotFoundError, RequestError

ALIAS_HEADER = "X-Amzn-SageMaker-Adapter-Alias"
MAX_NAME = 256

_PRINTABLE = "[^\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]"
_NAME = with_schema(STRING, {"pattern": f"^{_PRINTABLE}{{1,{MAX_NAME}}}$"})
_SRC = with_schema(STRING, {"minLength": 1})
_BOOLEANS = {"true": True, "false": False}

ADAPTER_FIELDS: Fields = {
    "name": Field(_NAME, "The name by which requests select the adapter."),
    "src": Field(_SRC, "The adapter's directory, in PEFT's format."),
    "preload": Field(BOOLEAN, "This has no effect: every adapter is loaded immediately."),
    "pin": Field(
        BOOLEAN, "This has no effect: an adapter stays loaded until a request unloads it."
    ),
}
UPDATE_FIELDS: Fields = {
    "src": Field(_SRC, "The directory that the adapter was loaded from."),
    "preload": ADAPTER_FIELDS["preload"],
    "pin": ADAPTER_FIELDS["pin"],
}
VLLM_LOAD_FIELDS: Fields = {
    "lora_name": ADAPTER_FIELDS["name"],
    "lora_path": ADAPTER_FIELDS["src"],
    "base_model_name": MODEL_IGNORED,
    "load_inplace": unsupported(BOOLEAN, False, instead="unload the adapter first"),
}
VLLM_UNLOAD_FIELDS: Fields = {
    "lora_name": ADAPTER_FIELDS["name"],
    "lora_int_id": ignored("The name identifies the adapter."),
}


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    name: str
    src: str


def read_adapter_request(body: Mapping[str, object]) -> AdapterRequest:
    """Validate a request to load an adapter. Raises RequestError naming the first bad field."""
    values = read_fields(body, ADAPTER_FIELDS)
    return AdapterRequest(_name(values, "name"), _src(values, "src"))


def read_vllm_load_request(body: Mapping[str, object]) -> AdapterRequest:
    """Validate vLLM's request to load an adapter; raises as `read_adapter_request` does."""
    values = read_fields(body, VLLM_LOAD_FIELDS)
    return AdapterRequest(_name(values, "lora_name"), _src(values, "lora_path"))


def _name(values: Values, field: str) -> str:
    name: str = values.get(field, "")
    if not re.fullmatch(f"{_PRINTABLE}{{1,{MAX_NAME}}}", name):
        raise RequestError(field, f"expected a string of 1 to {MAX_NAME} printable characters")
    return name


def _src(values: Values, field: str) -> str:
    src: str = values.get(field, "")
    if not src:
        raise RequestError(field, "expected the adapter's directory")
    return src


class AdapterRoutes:
    """The routes for the adapters of this container's model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: Flask) -> None:
        """Add the routes to the app, and LMI's routes also below the model's own path."""
        for prefix in ("", "/models/<model>"):
            for path, view, method in (
                ("/adapters", self.adapters, "GET"),
                ("/adapters", self.load, "POST"),
                ("/adapters/<path:name>", self.adapter, "GET"),
                ("/adapters/<path:name>", self.unload, "DELETE"),
                ("/adapters/<path:name>/update", self.update, "POST"),
            ):
                app.add_url_rule(
                    prefix + path, view_func=view, methods=[method], strict_slashes=False
                )
        app.add_url_rule("/v1/load_lora_adapter", view_func=self.load_lora, methods=["POST"])
        app.add_url_rule("/v1/unload_lora_adapter", view_func=self.unload_lora, methods=["POST"])

    def adapters(self, model: str | None = None) -> Response:
        """List the loaded adapters."""
        self._require_lora(model)
        return json_response({"adapters": list(map(_described, self._service.client.adapters))})

    def adapter(self, name: str, model: str | None = None) -> Response:
        self._require_lora(model)
        return json_response(_described(self._loaded(name)))

    def load(self, model: str | None = None) -> Response:
        """Load an adapter while requests run."""
        self._require_lora(model)
        context = request_context()
        adapter = read_adapter_request(_fields(context))
        self._load(context, adapter, "name", "src")
        return _status(context, adapter.name, "registered")

    def update(self, name: str, model: str | None = None) -> Response:
        """Accept DJL Serving's settings of a loaded adapter, which change nothing here."""
        self._require_lora(model)
        values = read_fields(_fields(request_context()), UPDATE_FIELDS)
        adapter = self._loaded(name)
        if values.get("src", adapter.src) != adapter.src:
            raise RequestError("src", "cannot be changed; unload the adapter and load it again")
        return json_response({"status": f"Adapter {name} updated"})

    def unload(self, name: str, model: str | None = None) -> Response:
        """Unload an adapter. Requests that already use it run to their end."""
        self._require_lora(model)
        context = request_context()
        self._unload(context, name)
        return _status(context, name, "unregistered")

    def load_lora(self) -> Response:
        """Handle vLLM's POST /v1/load_lora_adapter."""
        self._require_lora()
        context = request_context()
        adapter = read_vllm_load_request(context.json_fields())
        self._load(context, adapter, "lora_name", "lora_path")
        return _success(f"LoRA adapter '{adapter.name}' added successfully.")

    def unload_lora(self) -> Response:
        """Handle vLLM's POST /v1/unload_lora_adapter."""
        self._require_lora()
        context = request_context()
        values = read_fields(context.json_fields(), VLLM_UNLOAD_FIELDS)
        name = _name(values, "lora_name")
        self._unload(context, name)
        return _success(f"LoRA adapter '{name}' removed successfully.")

    def _load(
        self, context: RequestContext, adapter: AdapterRequest, name_field: str, src_field: str
    ) -> None:
        """Load the adapter and wait. Errors name the request's own `name_field` and `src_field`."""
        if adapter.name == self._service.model_name:
            raise RequestError(name_field, "is the model's own name; choose another")
        options, model_dir = self._service.options, Path(self._service.client.facts.model)
        model_roots = [
            model_dir,
            *([model_dir / options.lora.adapters] if options.lora.adapters else []),
        ]
        source_roots(options, model_roots).require(adapter.src, src_field)
        for reply in self._service.client.load_adapter(adapter.name, adapter.src):
            self._service.wait_for(context, reply)

    def _unload(self, context: RequestContext, name: str) -> None:
        for reply in self._service.client.unload_adapter(name):
            self._service.wait_for(context, reply)

    def _loaded(self, name: str) -> Adapter:
        for adapter in self._service.client.adapters:
            if adapter.name == name:
                return adapter
        raise NotFoundError(f"no adapter '{name}' is loaded")

    def _require_lora(self, model: str | None = None) -> None:
        """Check that LoRA is enabled, and that `model`, if given, names this container's model."""
        if model is not None:
            self._service.require_model(model)
        if not self._service.options.lora.enable_lora:
            raise lora_disabled()


def _fields(context: RequestContext) -> Mapping[str, object]:
    """Return the fields of the query string, as DJL Serving does, or without one the body's."""
    query = {name: _BOOLEANS.get(value, value) for name, value in request.args.items()}
    if query or not context.body:
        return query
    return context.json_fields()


def _status(context: RequestContext, name: str, change: str) -> Response:
    """Return a message that names the adapter, by SageMaker's alias if the request has one."""
    shown = context.headers.get(ALIAS_HEADER) or name
    return json_response({"status": f"Adapter {shown} {change}"})


def _success(message: str) -> Response:
    return Response(f"Success: {message}", mimetype="text/plain")


def _described(adapter: Adapter) -> dict[str, object]:
    return {"name": adapter.name, "src": adapter.src, "preload": True, "pin": True}
