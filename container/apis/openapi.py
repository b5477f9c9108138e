"""The OpenAPI document, built from the routes and the tables that requests are checked against."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from itertools import chain

from flask import Response

from container.http.route import ALL_KINDS, Api, Body, Contract, Route, get
from container.http.service import Service, json_response
from container.schema.fields import Field, Fields
from container.schema.form import MIMETYPE

Json = Mapping[str, object]

_RESPONSES = {
    "200": {"description": "The response."},
    "4XX": {"description": "What is wrong with the request, and the field that is wrong."},
    "503": {"description": "The server is not ready or is too busy. Try again later."},
}
_ANYTHING: Json = {"content": {"*/*": {"schema": {}}}}
_TEXT: Json = {"schema": {"type": "string"}}
_BYTES: Json = {"schema": {"type": "string", "format": "binary"}}


def openapi_document(contract: Contract) -> Json:
    """Return the OpenAPI document of a container's routes."""
    routes = [route for api in contract.apis for route in api.routes if route.summary]
    paths: dict[str, dict[str, Json]] = {}
    for route in routes:
        operations = paths.setdefault(route.documented_path, {})
        operations[route.method.lower()] = _operation(route, contract)
    invoked = contract.invocation.bodies if any(route.takes_invocation for route in routes) else ()
    bodies = chain(invoked, *(route.bodies for route in routes))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Longshore", "version": importlib.metadata.version("longshore")},
        "paths": paths,
        "components": {
            "schemas": {table.name: _schema(table) for body in bodies for table in body.tables}
        },
    }


def document(service: Service) -> Response:
    return json_response(openapi_document(service.contract))


OPENAPI = Api(
    "Longshore",
    (
        get("/openapi.json", "Return the OpenAPI document.", document),
    ),
    kinds=ALL_KINDS,
)  # fmt: skip


def _operation(route: Route, contract: Contract) -> Json:
    further = {str(status): {"description": text} for status, text in route.responses.items()}
    operation: dict[str, object] = {
        "summary": route.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.parameters
        ],
        "responses": {**_RESPONSES, **further},
    }
    if route.takes_invocation:
        operation["requestBody"] = _invocation_body(contract)
    elif route.bodies:
        operation["requestBody"] = {"required": True, "content": _content(route.bodies)}
    return operation


def _invocation_body(contract: Contract) -> Json:
    invocation = contract.invocation
    if not invocation.bodies:
        return _ANYTHING
    files = {f"{kind}/*": _BYTES for kind in invocation.file_types}
    texts = dict.fromkeys(("text/plain", "text/csv"), _TEXT)
    return {"required": True, "content": {**_content(invocation.bodies), **files, **texts}}


def _content(bodies: Sequence[Body]) -> dict[str, Json]:
    references = [_reference(body) for body in bodies]
    if any(body.is_form for body in bodies):
        (reference,) = references
        return {MIMETYPE: {"schema": reference}}
    return {"application/json": {"schema": {"anyOf": references}}}


def _reference(body: Body) -> Json:
    return {"$ref": f"#/components/schemas/{body.name}"}


def _schema(body: Body) -> Json:
    parts = {
        name: {"anyOf": [_reference(part), {"type": "null"}]} for name, part in body.parts.items()
    }
    properties = _form(body.fields) if body.is_form else _properties(body.fields)
    return {
        "type": "object",
        "properties": {**properties, **parts},
        "required": list(body.required),
        "additionalProperties": False if body.is_form else {"type": "null"},
    }


def _form(fields: Fields) -> dict[str, Json]:
    """Return a form's fields. A form has no null, so fields without a valid value are left out."""
    properties: dict[str, Json] = {}
    for name, field in fields.items():
        if field.effect != "unsupported":
            properties[name] = {"description": field.doc, **field.kind.schema}
        elif field.neutral:
            properties[name] = {"description": field.doc, "enum": list(field.neutral)}
    return properties


def _properties(fields: Fields) -> dict[str, Json]:
    return {name: _property(field) for name, field in fields.items()}


def _property(field: Field) -> Json:
    """Return a field's JSON Schema. Null is always valid, as it means that the field is not set."""
    if field.effect == "unsupported":
        return {"description": field.doc, "enum": [*field.neutral, None]}
    if not field.kind.schema:
        return {"description": field.doc}
    return {"description": field.doc, "anyOf": [field.kind.schema, {"type": "null"}]}
