"""The routes for LoRA adapters: LMI's and SageMaker's, and vLLM's two."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flask import Response, request

from container.http.request_context import RequestContext, request_context
from container.http.route import Api, Body, Route, delete, get, post
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
from container.wire.engine_connection import EngineConnection
from core.adapter import lora_disabled
from core.configuration.task import Kind
from core.errors import NotFoundError, RequestError
from core.protocol.messages import LoadAdapter, ToEngine, UnloadAdapter, Variant

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


def adapters(service: Service, model: str | None = None) -> Response:
    """List the loaded adapters."""
    _require_lora(service, model)
    return json_response({"adapters": list(map(_described, service.client.variants))})


def adapter(service: Service, name: str, model: str | None = None) -> Response:
    _require_lora(service, model)
    return json_response(_described(_loaded(service, name)))


def load(service: Service, model: str | None = None) -> Response:
    """Load an adapter while requests run."""
    _require_lora(service, model)
    context = request_context()
    wanted = read_adapter_request(_fields(context))
    _load(service, context, wanted, "name", "src")
    return _status(context, wanted.name, "registered")


def update(service: Service, name: str, model: str | None = None) -> Response:
    """Accept DJL Serving's settings of a loaded adapter, which change nothing here."""
    _require_lora(service, model)
    values = read_fields(_fields(request_context()), UPDATE_FIELDS)
    loaded = _loaded(service, name)
    if values.get("src", loaded.src) != loaded.src:
        raise RequestError("src", "cannot be changed; unload the adapter and load it again")
    return json_response({"status": f"Adapter {name} updated"})


def unload(service: Service, name: str, model: str | None = None) -> Response:
    """Unload an adapter. Requests that already use it run to their end."""
    _require_lora(service, model)
    context = request_context()
    _unload(service, context, name)
    return _status(context, name, "unregistered")


def load_lora(service: Service) -> Response:
    """Handle vLLM's POST /v1/load_lora_adapter."""
    _require_lora(service)
    context = request_context()
    wanted = read_vllm_load_request(context.json_fields())
    _load(service, context, wanted, "lora_name", "lora_path")
    return _success(f"LoRA adapter '{wanted.name}' added successfully.")


def unload_lora(service: Service) -> Response:
    """Handle vLLM's POST /v1/unload_lora_adapter."""
    _require_lora(service)
    context = request_context()
    values = read_fields(context.json_fields(), VLLM_UNLOAD_FIELDS)
    name = _name(values, "lora_name")
    _unload(service, context, name)
    return _success(f"LoRA adapter '{name}' removed successfully.")


def _load(
    service: Service,
    context: RequestContext,
    adapter: AdapterRequest,
    name_field: str,
    src_field: str,
) -> None:
    """Load the adapter into every ready engine that lacks it, and wait.

    If none lacks it, the first engine is asked, and refuses. Errors name the request's own
    `name_field` and `src_field`.
    """
    if adapter.name == service.model_name:
        raise RequestError(name_field, "is the model's own name; choose another")
    options, model_dir = service.options, Path(service.client.facts.model)
    model_roots = [
        model_dir,
        *([model_dir / options.lora.adapters] if options.lora.adapters else []),
    ]
    source_roots(options.server, model_roots).require(adapter.src, src_field)
    having, lacking = service.client.by_variant(adapter.name)
    _ask(service, context, lacking or having[:1],
         lambda id: LoadAdapter(id, adapter.name, adapter.src))  # fmt: skip


def _unload(service: Service, context: RequestContext, name: str) -> None:
    """Unload the adapter from every engine that has it. If none has, the first one refuses."""
    having, lacking = service.client.by_variant(name)
    _ask(service, context, having or lacking[:1], lambda id: UnloadAdapter(id, name))


def _ask(
    service: Service,
    context: RequestContext,
    engines: Sequence[EngineConnection],
    message: Callable[[str], ToEngine],
) -> None:
    """Send every engine its message, then wait for the replies."""
    for reply in [engine.request(message) for engine in engines]:
        service.wait_for(context, reply)


def _loaded(service: Service, name: str) -> Variant:
    for adapter in service.client.variants:
        if adapter.name == name:
            return adapter
    raise NotFoundError(f"no adapter '{name}' is loaded")


def _require_lora(service: Service, model: str | None = None) -> None:
    """Check that LoRA is enabled, and that `model`, if given, names this container's model."""
    if model is not None:
        service.require_model(model)
    if not service.options.lora.enable_lora:
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


def _described(adapter: Variant) -> dict[str, object]:
    return {"name": adapter.name, "src": adapter.src, "preload": True, "pin": True}


_ADAPTER = Body("Adapter", ADAPTER_FIELDS, ("name", "src"))
_UPDATE = Body("AdapterUpdate", UPDATE_FIELDS)
_LOAD_LORA = Body("LoadLora", VLLM_LOAD_FIELDS, ("lora_name", "lora_path"))
_UNLOAD_LORA = Body("UnloadLora", VLLM_UNLOAD_FIELDS, ("lora_name",))
_NO_SLOT = {507: "As many adapters as option.max_loras allows are loaded. Unload one first."}


def _routes(prefix: str) -> tuple[Route, ...]:
    path, named = f"{prefix}/adapters", f"{prefix}/adapters/<path:name>"
    routes = (
        get(path, "List the loaded LoRA adapters.", adapters),
        post(path, "Load an adapter. The response is sent once the adapter can be used.", load,
             _ADAPTER, responses=_NO_SLOT),
        get(named, "Describe an adapter.", adapter),
        delete(named, "Unload an adapter.", unload),
        post(f"{named}/update", "Accept settings of a loaded adapter, and change nothing.", update,
             _UPDATE),
    )  # fmt: skip
    return tuple(replace(route, allows_slash=True) for route in routes)


_KINDS: tuple[Kind, ...] = ("generation", "embedding", "pipeline")
ADAPTERS = Api("SageMaker", _routes(""), _KINDS)
DJL_ADAPTERS = Api("DJL Serving", _routes("/models/<model>"), _KINDS)
"""LMI's routes, also below the model's own path."""
VLLM_ADAPTERS = Api(
    "vLLM",
    (
        post("/v1/load_lora_adapter", "vLLM's route to load an adapter.", load_lora, _LOAD_LORA,
             responses=_NO_SLOT),
        post("/v1/unload_lora_adapter", "vLLM's route to unload an adapter.", unload_lora,
             _UNLOAD_LORA),
    ),
    _KINDS,
)  # fmt: skip
