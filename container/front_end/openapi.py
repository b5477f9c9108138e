"""The OpenAPI document, built from the field tables that requests are checked against."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

from container.apis.adapter_routes import (
    ADAPTER_FIELDS,
    UPDATE_FIELDS,
    VLLM_LOAD_FIELDS,
    VLLM_UNLOAD_FIELDS,
)
from container.apis.anthropic.schema import COUNT_FIELDS, MESSAGES_FIELDS
from container.apis.chat.schema import CHAT_FIELDS
from container.apis.completions.schema import COMPLETION_FIELDS
from container.apis.embeddings import EMBEDDING_FIELDS, INPUTS_FIELDS
from container.apis.model_routes import LOAD_FIELDS
from container.apis.responses.schema import RESPONSES_FIELDS
from container.apis.tasks.pipeline import PIPELINE_FIELDS
from container.apis.tasks.rerank import RERANK_FIELDS, SCORE_FIELDS, TEXTS_FIELDS
from container.apis.tasks.transcription import TRANSCRIPTION_FIELDS
from container.apis.text.schema import PARAMETERS, TEXT_FIELDS
from container.apis.tokenize import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from container.http.health import HEALTH_PATHS
from container.schema.fields import Field, Fields
from container.schema.form import MIMETYPE
from core.configuration.pipeline_tasks import FILES
from core.configuration.task import Kind

Json = Mapping[str, object]


def openapi_document(kind: Kind = "generation", *, with_runtime: bool) -> Json:
    """Return the OpenAPI document for a kind of task.

    `with_runtime` adds the routes of the SageMaker runtime API.
    """
    bodies = _BODIES[kind]
    paths = {**_invocations_paths(bodies), **_OWN_PATHS[kind], **_MODEL_PATHS}
    return _document({**paths, **(_runtime_paths(bodies) if with_runtime else {})}, _SCHEMAS[kind])


def multi_model_document() -> Json:
    """Return the OpenAPI document of a container of several models.

    Each model has a document of its own for its routes.
    """
    return _document(_FRONT_PATHS, {"Load": _object(LOAD_FIELDS, list(LOAD_FIELDS))})


def _document(paths: Json, schemas: Json) -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Longshore", "version": importlib.metadata.version("longshore")},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _object(fields: Fields, required: Sequence[str] = ()) -> Json:
    return {
        "type": "object",
        "properties": _properties(fields),
        "required": list(required),
        "additionalProperties": {"type": "null"},
    }


def _form(fields: Fields, required: Sequence[str]) -> Json:
    """Return a form's schema. A form has no null, so fields without a valid value are left out."""
    properties: dict[str, Json] = {}
    for name, field in fields.items():
        if field.effect != "unsupported":
            properties[name] = {"description": field.doc, **field.kind.schema}
        elif field.neutral:
            properties[name] = {"description": field.doc, "enum": list(field.neutral)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _properties(fields: Fields) -> Json:
    return {name: _property(field) for name, field in fields.items()}


def _property(field: Field) -> Json:
    """Return a field's JSON Schema. Null is always valid, as it means that the field is not set."""
    if field.effect == "unsupported":
        return {"description": field.doc, "enum": [*field.neutral, None]}
    if not field.kind.schema:
        return {"description": field.doc}
    return {"description": field.doc, "anyOf": [field.kind.schema, {"type": "null"}]}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(*names: str, allows_text: bool = False, files: Sequence[str] = ()) -> Json:
    content: dict[str, object] = {"application/json": {"schema": {"anyOf": list(map(_ref, names))}}}
    content |= {f"{kind}/*": {"schema": {"type": "string", "format": "binary"}} for kind in files}
    if allows_text:
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


def _adapter_paths(prefix: str, *path_names: str) -> Json:
    return {
        f"{prefix}/adapters": {
            **_get("List the loaded LoRA adapters.", *path_names),
            **_post(
                "Load an adapter. The response is sent once the adapter can be used.",
                _body("Adapter"),
                *path_names,
                **_NO_SLOT,
            ),
        },
        f"{prefix}/adapters/{{name}}": {
            **_get("Describe an adapter.", *path_names, "name"),
            **_delete("Unload an adapter.", *path_names, "name"),
        },
        f"{prefix}/adapters/{{name}}/update": _post(
            "Accept settings of a loaded adapter, and change nothing.",
            _body("AdapterUpdate"),
            *path_names,
            "name",
        ),
    }


_NO_SLOT: dict[str, Json] = {
    "507": {
        "description": "As many adapters as option.max_loras allows are loaded. Unload one first."
    }
}
_UPGRADE: dict[str, Json] = {"101": {"description": "The connection is now a WebSocket."}}
_PARAMETERS = {"anyOf": [_ref("Parameters"), {"type": "null"}]}
_SCHEMAS: Mapping[Kind, Json] = {
    "generation": {
        "Text": {
            **_object(TEXT_FIELDS, ["inputs"]),
            "properties": {**_properties(TEXT_FIELDS), "parameters": _PARAMETERS},
        },
        "Parameters": _object(PARAMETERS),
        "Chat": _object(CHAT_FIELDS, ["messages"]),
        "Completion": _object(COMPLETION_FIELDS, ["prompt"]),
        "Response": _object(RESPONSES_FIELDS, ["input"]),
        "Messages": _object(MESSAGES_FIELDS, ["messages"]),
        "CountTokens": _object(COUNT_FIELDS, ["messages"]),
        "Tokenize": _object(TOKENIZE_FIELDS),
        "Detokenize": _object(DETOKENIZE_FIELDS, ["tokens"]),
        "Adapter": _object(ADAPTER_FIELDS, ["name", "src"]),
        "AdapterUpdate": _object(UPDATE_FIELDS),
        "LoadLora": _object(VLLM_LOAD_FIELDS, ["lora_name", "lora_path"]),
        "UnloadLora": _object(VLLM_UNLOAD_FIELDS, ["lora_name"]),
    },
    "embedding": {
        "Embedding": _object(EMBEDDING_FIELDS, ["input"]),
        "Inputs": _object(INPUTS_FIELDS, ["inputs"]),
    },
    "pipeline": {
        "Pipeline": _object(PIPELINE_FIELDS, ["inputs"]),
        "Rerank": _object(RERANK_FIELDS, ["query", "documents"]),
        "Texts": _object(TEXTS_FIELDS, ["query", "texts"]),
        "Score": _object(SCORE_FIELDS, ["text_1", "text_2"]),
        "Transcription": _form(TRANSCRIPTION_FIELDS, ["file"]),
    },
    "handler": {},
}
_RESPONSES = {
    "200": {"description": "The response."},
    "4XX": {"description": "What is wrong with the request, and the field that is wrong."},
    "503": {"description": "The server is not ready or is too busy. Try again later."},
}
_ANYTHING: Json = {"content": {"*/*": {"schema": {}}}}
_BODIES: Mapping[Kind, Json] = {
    "generation": _body("Text", "Chat", "Completion", allows_text=True),
    "embedding": _body("Inputs", "Embedding", allows_text=True),
    "pipeline": _body("Pipeline", "Rerank", "Texts", allows_text=True, files=tuple(FILES.values())),
    "handler": _ANYTHING,
}
_SPEECH: Json = {
    "required": True,
    "content": {MIMETYPE: {"schema": _ref("Transcription")}},
}
_RERANK = _post("Rank texts by their score for a query.", _body("Rerank", "Texts"))
_SCORE = _post("Score pairs of texts.", _body("Score"))
_OWN_PATHS: Mapping[Kind, Json] = {
    "generation": {
        "/invocations-bidirectional-stream": {
            "get": _operation(
                "A WebSocket whose messages are requests to /invocations.", (), **_UPGRADE
            )
        },
        "/v1/chat/completions": _post("OpenAI's chat completions.", _body("Chat")),
        "/v1/completions": _post("OpenAI's completions.", _body("Completion")),
        "/v1/responses": _post("OpenAI's responses. Nothing is stored.", _body("Response")),
        "/v1/messages": _post("Anthropic's messages.", _body("Messages")),
        "/v1/messages/count_tokens": _post(
            "Count the tokens of Anthropic's messages.", _body("CountTokens")
        ),
        "/": _post("text-generation-inference's answer, in a list or as a stream.", _body("Text")),
        "/generate": _post("text-generation-inference's answer.", _body("Text")),
        "/generate_stream": _post("text-generation-inference's answer as a stream.", _body("Text")),
        "/info": _get("Describe the model and the limits, as text-generation-inference does."),
        "/tokenize": _post("Tokenize a text or a conversation.", _body("Tokenize")),
        "/detokenize": _post("Return the text of token ids.", _body("Detokenize")),
        **_adapter_paths(""),
        **_adapter_paths("/models/{model}", "model"),
        "/v1/load_lora_adapter": _post(
            "vLLM's route to load an adapter.", _body("LoadLora"), **_NO_SLOT
        ),
        "/v1/unload_lora_adapter": _post("vLLM's route to unload an adapter.", _body("UnloadLora")),
    },
    "embedding": {"/v1/embeddings": _post("OpenAI's embeddings.", _body("Embedding"))},
    "pipeline": {
        "/rerank": _RERANK,
        "/v1/rerank": _RERANK,
        "/v2/rerank": _RERANK,
        "/score": _SCORE,
        "/v1/score": _SCORE,
        "/v1/audio/transcriptions": _post("Transcribe speech.", _SPEECH),
        "/v1/audio/translations": _post("Translate speech to English text.", _SPEECH),
    },
    "handler": {},
}
_MODEL_PATHS: Json = {
    "/models": _get("List the model, in DJL Serving's format."),
    "/models/{name}": _get("Describe the model, in DJL Serving's format.", "name"),
    "/v1/models": _get("List the model and its adapters, in OpenAI's format."),
    "/v1/models/{name}": _get("Describe the model or an adapter, in OpenAI's format.", "name"),
    "/version": _get("Return the version of this server."),
    "/load": _get("Return the number of sequences that run or wait."),
    "/metrics": _get("Return the engine's metrics in Prometheus' text format."),
    "/openapi.json": _get("Return the OpenAPI document."),
}
_FRONT_PATHS: Json = {
    **{path: _get("Return 200 once all models of the store are loaded.") for path in HEALTH_PATHS},
    "/models": {
        **_get("List the models by name, page by page (limit, next_page_token)."),
        **_post(
            "Load a model. The response is sent once the model is ready.",
            _body("Load"),
            **{"507": {"description": "There is not enough memory. Unload another model first."}},
        ),
    },
    "/models/{name}": {
        **_get("Describe a model.", "name"),
        **_delete("Unload a model. The response is sent once its memory is free.", "name"),
    },
    "/models/{name}/invoke": _post(
        "Send a request to the model's /invocations.", _ANYTHING, "name"
    ),
    "/models/{name}/openapi.json": _get(
        "Return the model's own document. Its paths are below /models/NAME.", "name"
    ),
    "/predictions/{name}": _post("Send a request to the model's /invocations.", _ANYTHING, "name"),
    "/invocations": _post(
        "Send a request to the model that X-Amzn-SageMaker-Target-Model names, or to the only one.",
        _ANYTHING,
    ),
    "/metrics": _get("Return the metrics of all engines in Prometheus' text format."),
    "/openapi.json": _get("Return the OpenAPI document."),
}


def _invocations_paths(body: Json) -> Json:
    return {
        **{path: _get("Return 200 if the engine is healthy.") for path in HEALTH_PATHS},
        "/invocations": _post("Answer one request or a batch.", body),
        "/predictions/{model}": _post(
            "The same as /invocations, with the model's name in the path.", body, "model"
        ),
        "/models/{model}/invoke": _post(
            "The same as /invocations, with the model's name in the path.", body, "model"
        ),
    }


def _runtime_paths(body: Json) -> Json:
    return {
        "/endpoints/{name}/invocations": _post("SageMaker's InvokeEndpoint.", body, "name"),
        "/endpoints/{name}/invocations-response-stream": _post(
            "SageMaker's InvokeEndpointWithResponseStream.", body, "name"
        ),
    }
