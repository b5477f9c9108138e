"""The project's OpenAPI document, made of the tables that the schemas themselves check with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

from container.apis.adapters.schema import ADAPTER_FIELDS
from container.apis.chat.schema import CHAT_FIELDS
from container.apis.completions.schema import COMPLETION_FIELDS
from container.apis.embeddings.schema import EMBEDDING_FIELDS, INPUTS_FIELDS
from container.apis.models.schema import LOAD_FIELDS
from container.apis.openai.tokens import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from container.apis.tasks.pipeline_schema import PIPELINE_FIELDS
from container.apis.text.schema import PARAMETERS, TEXT_FIELDS
from container.schema.fields import Field, Fields
from core.pipeline_tasks import FILES
from core.task import Kind

Json = Mapping[str, object]


def openapi_document(kind: Kind = "generation", *, with_runtime: bool) -> Json:
    """The routes of a kind of task and what they take.

    `with_runtime`: SageMaker's runtime routes are served too.
    """
    bodies = _BODIES[kind]
    paths = {**_door_paths(bodies), **_OWN_PATHS[kind], **_MODEL_PATHS}
    return _document({**paths, **(_runtime_paths(bodies) if with_runtime else {})}, _schemas(kind))


def multi_model_document() -> Json:
    """The routes in front of several models; of what a model takes its own document tells."""
    return _document(_FRONT_PATHS, {"Load": _object(LOAD_FIELDS, list(LOAD_FIELDS))})


def _document(paths: Json, schemas: Json) -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Longshore", "version": importlib.metadata.version("longshore")},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _schemas(kind: Kind) -> Json:
    match kind:
        case "generation":
            return _generation_schemas()
        case "embedding":
            return {
                "Embedding": _object(EMBEDDING_FIELDS, ["input"]),
                "Inputs": _object(INPUTS_FIELDS, ["inputs"]),
            }
        case "pipeline":
            return {"Pipeline": _object(PIPELINE_FIELDS, ["inputs"])}
        case "handler":
            return {}


def _generation_schemas() -> Json:
    text = _object(TEXT_FIELDS, ["inputs"])
    return {
        "Text": {**text, "properties": {**_properties(TEXT_FIELDS), "parameters": _PARAMETERS}},
        "Parameters": _object(PARAMETERS),
        "Chat": _object(CHAT_FIELDS, ["messages"]),
        "Completion": _object(COMPLETION_FIELDS, ["prompt"]),
        "Tokenize": _object(TOKENIZE_FIELDS),
        "Detokenize": _object(DETOKENIZE_FIELDS, ["tokens"]),
        "Adapter": _object(ADAPTER_FIELDS, ["name", "src"]),
    }


def _object(fields: Fields, required: Sequence[str] = ()) -> Json:
    return {
        "type": "object",
        "properties": _properties(fields),
        "required": list(required),
        "additionalProperties": False,
    }


def _properties(fields: Fields) -> Json:
    return {name: _property(field) for name, field in fields.items()}


def _property(field: Field) -> Json:
    """Null means not given, and so is always right."""
    if field.effect == "unserved":
        return {"description": field.doc, "enum": [*field.neutral, None]}
    if not field.kind.schema:
        return {"description": field.doc}
    return {"description": field.doc, "anyOf": [field.kind.schema, {"type": "null"}]}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(*names: str, plain: bool = False, files: Sequence[str] = ()) -> Json:
    content: dict[str, object] = {"application/json": {"schema": {"anyOf": list(map(_ref, names))}}}
    content |= {f"{kind}/*": {"schema": {"type": "string", "format": "binary"}} for kind in files}
    if plain:
        for kind in ("text/plain", "text/csv"):
            content[kind] = {"schema": {"type": "string"}}
    return {"required": True, "content": content}


def _get(summary: str, *path_names: str) -> Json:
    return {"get": _operation(summary, path_names)}


def _delete(summary: str, *path_names: str) -> Json:
    return {"delete": _operation(summary, path_names)}


def _post(summary: str, body: Json, *path_names: str, **responses: Json) -> Json:
    operation = _operation(summary, path_names, **responses)
    return {"post": {**operation, "requestBody": body}}


def _operation(summary: str, path_names: Sequence[str], **responses: Json) -> Json:
    return {
        "summary": summary,
        **_parameters(path_names),
        "responses": {**_RESPONSES, **responses},
    }


def _parameters(names: Sequence[str]) -> Json:
    return {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    }


_PARAMETERS = {"anyOf": [_ref("Parameters"), {"type": "null"}]}
_RESPONSES = {
    "200": {"description": "The answer."},
    "4XX": {"description": "What is wrong with the request, and with which field."},
    "503": {"description": "Not ready, or too busy; worth trying again."},
}
_ANYTHING: Json = {"content": {"*/*": {"schema": {}}}}
_BODIES: Mapping[Kind, Json] = {
    "generation": _body("Text", "Chat", "Completion", plain=True),
    "embedding": _body("Inputs", "Embedding", plain=True),
    "pipeline": _body("Pipeline", plain=True, files=tuple(FILES.values())),
    "handler": _ANYTHING,
}
_OWN_PATHS: Mapping[Kind, Json] = {
    "generation": {
        "/v1/chat/completions": _post("OpenAI's chat completions.", _body("Chat")),
        "/v1/completions": _post("OpenAI's completions.", _body("Completion")),
        "/tokenize": _post("The tokens of a text or a conversation.", _body("Tokenize")),
        "/detokenize": _post("The text of tokens.", _body("Detokenize")),
        "/adapters": {
            **_get("The LoRA adapters that are loaded."),
            **_post(
                "Load one; answered when requests may use it.",
                _body("Adapter"),
                **{"507": {"description": "option.max_loras are loaded: unload another one."}},
            ),
        },
        "/adapters/{name}": {
            **_get("The adapter of that name.", "name"),
            **_delete("Unload it.", "name"),
        },
    },
    "embedding": {"/v1/embeddings": _post("OpenAI's embeddings.", _body("Embedding"))},
    "pipeline": {},
    "handler": {},
}
_MODEL_PATHS: Json = {
    "/models": _get("The one model, as DJL Serving lists it."),
    "/models/{name}": _get("The same, as DJL Serving describes it.", "name"),
    "/v1/models": _get("The one model, and its adapters."),
    "/v1/models/{name}": _get("The model of that name.", "name"),
    "/metrics": _get("What the engine is doing, in Prometheus' form."),
    "/openapi.json": _get("This document."),
}
_FRONT_PATHS: Json = {
    "/ping": _get("Whether models are served and may be loaded."),
    "/models": {
        **_get("The models by their names, a page at a time (limit, next_page_token)."),
        **_post(
            "Load a model; answered when it is ready.",
            _body("Load"),
            **{"507": {"description": "Memory is short: unload another one."}},
        ),
    },
    "/models/{name}": {
        **_get("One model.", "name"),
        **_delete("Unload it; answered when nothing of it is left.", "name"),
    },
    "/models/{name}/invoke": _post("Its /invocations.", _ANYTHING, "name"),
    "/models/{name}/openapi.json": _get("Its own document: /models/NAME/ comes first.", "name"),
    "/predictions/{name}": _post("Its /invocations.", _ANYTHING, "name"),
    "/invocations": _post(
        "Of the model that X-Amzn-SageMaker-Target-Model names, or the only one.", _ANYTHING
    ),
    "/metrics": _get("What all engines are doing, in Prometheus' form."),
    "/openapi.json": _get("This document."),
}


def _door_paths(body: Json) -> Json:
    return {
        "/ping": _get("Whether requests would be answered."),
        "/invocations": _post("The answer to one request or a batch of them.", body),
        "/predictions/{model}": _post("As /invocations, by the model's name.", body, "model"),
        "/models/{model}/invoke": _post("The same.", body, "model"),
    }


def _runtime_paths(body: Json) -> Json:
    return {
        "/endpoints/{name}/invocations": _post("SageMaker's InvokeEndpoint.", body, "name"),
        "/endpoints/{name}/invocations-response-stream": _post(
            "SageMaker's InvokeEndpointWithResponseStream.", body, "name"
        ),
    }
