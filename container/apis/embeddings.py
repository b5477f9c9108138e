"""Embeddings: OpenAI's `input`, and `inputs` as LMI and text-embeddings-inference take it."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from flask import Response

from container.apis.model_choice import model_choice
from container.apis.named_model import MODEL_FIELDS, NamedModel, read_model
from container.http.off_loop import LONG_BODY_BYTES, in_thread_if_long
from container.http.request_context import RequestContext, request_context
from container.http.route import Api, Body, Invocation, post
from container.http.service import Service, json_response
from container.schema.fields import Field, Fields, Values, ignored, read_fields
from container.schema.kinds import BOOLEAN, MAX_COUNT, OBJECT, STRING, integer, with_schema
from container.schema.prompts import PROMPT, read_prompts
from core.configuration.limits import EMBEDDINGS as MAX_EMBEDDINGS
from core.configuration.limits import TASK_TEXT
from core.errors import RequestError
from core.protocol.task_bodies import EmbeddingAnswer, EmbeddingBody

MAX_TOKENS = 2**31 - 1
"""The value of `max_tokens` that truncates inputs to the model's limit."""

_FORMATS = ("float", "base64")
_DTYPES = {"float32": "f", "float16": "e"}
"""vLLM's names of types, and those of the module `struct`."""

_DIMENSIONS = Field(
    integer(1, MAX_COUNT),
    "Keep only this many numbers of each vector. The model must be trained for that.",
)
EMBEDDING_FIELDS: Fields = {
    "input": Field(PROMPT, "One input or several, as strings or as token ids."),
    "encoding_format": Field(
        with_schema(STRING, {"enum": [*_FORMATS]}),
        "float (default): a list of numbers. base64: little-endian values of `embed_dtype`.",
    ),
    "embed_dtype": Field(
        with_schema(STRING, {"enum": [*_DTYPES]}),
        "float32 (default) or float16: the type of the values in base64, as in vLLM.",
    ),
    "dimensions": _DIMENSIONS,
    "truncate_prompt_tokens": Field(
        integer(-1, MAX_COUNT),
        "Truncate inputs to this many tokens. -1: truncate them to the model's limit.",
    ),
    **MODEL_FIELDS,
    "user": ignored(),
}
_PARAMETERS: Fields = {
    "truncate": Field(BOOLEAN, "Truncate inputs to the model's limit."),
}
INPUTS_FIELDS: Fields = {
    "inputs": Field(PROMPT, "One input or several, as strings or as token ids."),
    "truncate": Field(BOOLEAN, "The same as `parameters.truncate`."),
    "parameters": Field(OBJECT, "`truncate`: truncate inputs to the model's limit."),
    **MODEL_FIELDS,
}

EMBED_FIELDS: Fields = {
    "inputs": Field(PROMPT, "One input or several, as strings or as token ids."),
    "truncate": Field(BOOLEAN, "Truncate inputs to the model's limit (default false)."),
    "normalize": Field(BOOLEAN, "Scale vectors to length 1 (default true)."),
    "prompt_name": Field(
        STRING, "The prompt of config_sentence_transformers.json that precedes each text."
    ),
    "dimensions": _DIMENSIONS,
    **MODEL_FIELDS,
}

SPARSE_FIELDS: Fields = {
    name: EMBED_FIELDS[name] for name in ("inputs", "truncate", "prompt_name", *MODEL_FIELDS)
}


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    body: EmbeddingBody
    warnings: tuple[str, ...]
    model: NamedModel
    base64_dtype: str | None = None
    """The type of values in base64, as `struct` names it; None: vectors are lists of numbers."""


def read_embedding_request(body: Mapping[str, object]) -> EmbeddingRequest:
    """Check OpenAI's request. Raises RequestError, naming the first bad field."""
    values = read_fields(body, EMBEDDING_FIELDS)
    encoding = values.get("encoding_format", "float")
    if encoding not in _FORMATS:
        raise RequestError("encoding_format", f"expected one of {', '.join(_FORMATS)}")
    dtype = values.get("embed_dtype", "float32")
    if dtype not in _DTYPES:
        raise RequestError("embed_dtype", f"expected one of {', '.join(_DTYPES)}")
    if "embed_dtype" in values.given and encoding != "base64":
        raise RequestError("embed_dtype", "is for encoding_format=base64 only")
    max_tokens: int | None = MAX_TOKENS
    if values.get("truncate_prompt_tokens", -1) == 0:
        raise RequestError("truncate_prompt_tokens", "must be -1, or at least 1")
    if values.get("truncate_prompt_tokens", 0) != -1:
        max_tokens = values.get("truncate_prompt_tokens", None)
    task_body = EmbeddingBody(
        inputs=_read_inputs("input", values),
        field="input",
        max_tokens=max_tokens,
        dimensions=values.get("dimensions", None),
    )
    return EmbeddingRequest(
        task_body,
        values.warnings,
        read_model(values),
        _DTYPES[dtype] if encoding == "base64" else None,
    )


def read_inputs_request(body: Mapping[str, object]) -> EmbeddingRequest:
    """Check LMI's request. Raises RequestError, naming the first bad field."""
    values = read_fields(body, INPUTS_FIELDS)
    parameter_body: Mapping[str, object] = values.get("parameters", {})
    parameters = read_fields(parameter_body, _PARAMETERS, "parameters.")
    max_tokens = MAX_TOKENS if values.get("truncate", parameters.get("truncate", False)) else None
    inputs = _read_inputs("inputs", values)
    task_body = EmbeddingBody(inputs, "inputs", max_tokens, is_sparse=None)
    return EmbeddingRequest(task_body, values.warnings, read_model(values))


def read_embed_request(body: Mapping[str, object], *, is_sparse: bool = False) -> EmbeddingRequest:
    """Check the request of /embed, or of /embed_sparse.

    Raises RequestError, naming the first bad field.
    """
    values = read_fields(body, SPARSE_FIELDS if is_sparse else EMBED_FIELDS)
    task_body = EmbeddingBody(
        inputs=_read_inputs("inputs", values),
        field="inputs",
        max_tokens=MAX_TOKENS if values.get("truncate", False) else None,
        dimensions=values.get("dimensions", None),
        normalize=None if is_sparse else values.get("normalize", True),
        prompt_name=values.get("prompt_name", None),
        is_sparse=is_sparse,
    )
    return EmbeddingRequest(task_body, values.warnings, read_model(values))


def _read_inputs(field: str, values: Values) -> list[str | list[int]]:
    inputs = read_prompts(field, values.get(field, ""), MAX_EMBEDDINGS)
    for index, text in enumerate(inputs):
        if isinstance(text, str):
            TASK_TEXT.check(f"{field}[{index}]" if len(inputs) > 1 else field, len(text))
    return inputs


def read(service: Service, context: RequestContext) -> Mapping[str, object]:
    """Parse a body of any type that `RequestContext.fields` takes."""
    return context.fields()


def answer(service: Service, context: RequestContext, body: Mapping[str, object]) -> Response:
    """Return a list of vectors for `inputs`, or OpenAI's response for `input`."""
    if "input" in body:
        return _openai(service, context, body)
    return _vectors(service, context, context.read(lambda: read_inputs_request(body)))


def embed(service: Service) -> Response:
    """Return a list of vectors, as text-embeddings-inference does."""
    context = request_context()
    body = context.json_fields()
    return _vectors(service, context, context.read(lambda: read_embed_request(body)))


def embed_sparse(service: Service) -> Response:
    """Return lists of places and numbers, as text-embeddings-inference does."""
    context = request_context()
    body = context.json_fields()
    return _vectors(
        service, context, context.read(lambda: read_embed_request(body, is_sparse=True))
    )


def _vectors(service: Service, context: RequestContext, request: EmbeddingRequest) -> Response:
    _, answer = _embed(service, context, request)
    vectors, places = answer.vectors, answer.places
    if places is None:
        return _response(vectors, lambda: list(map(_numbers, vectors)))
    return _response(vectors, lambda: list(map(_sparse, places, vectors)))


def embeddings(service: Service) -> Response:
    context = request_context()
    return _openai(service, context, context.json_fields())


def _openai(service: Service, context: RequestContext, body: Mapping[str, object]) -> Response:
    request = context.read(lambda: read_embedding_request(body))
    model, embeddings = _embed(service, context, request)
    dtype = request.base64_dtype
    encode = _numbers if dtype is None else partial(_base64, dtype)
    num_tokens = sum(embeddings.num_tokens)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}

    def document() -> dict[str, object]:
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(embeddings.vectors)
        ]
        return {"object": "list", "data": data, "model": model, "usage": usage}

    return _response(embeddings.vectors, document)


def _embed(
    service: Service, context: RequestContext, request: EmbeddingRequest
) -> tuple[str, EmbeddingAnswer]:
    """Return the name of the model that answers, and its answer."""
    variant = model_choice(service.model_name, service.options)(context, *request.model)
    body = msgspec.msgpack.encode(request.body)
    engine = service.client.choose(variant=variant)
    reply = service.wait_for(context, engine.perform(body, {}, variant))
    answer = msgspec.msgpack.decode(reply.body, type=EmbeddingAnswer)
    context.charge(sum(answer.num_tokens))
    return variant or service.model_name, answer


def _response(vectors: Sequence[bytes], body: Callable[[], object]) -> Response:
    """Return the JSON of `body()`, which is made in a thread if the vectors are long."""
    size = sum(map(len, vectors))
    return in_thread_if_long(lambda: json_response(body()), size=size, long=LONG_BODY_BYTES)


def _base64(dtype: str, vector: bytes) -> str:
    """Return a vector of little-endian fp32 as base64 of values of another type."""
    if dtype != "f":
        num_values = len(vector) // 4
        try:
            values = struct.unpack(f"<{num_values}f", vector)
            vector = struct.pack(f"<{num_values}{dtype}", *values)
        except OverflowError:
            raise RequestError(
                "embed_dtype", "float16 cannot hold a value of this model's; ask for float32"
            ) from None
    return base64.b64encode(vector).decode()


def _numbers(vector: bytes) -> msgspec.Raw:
    """Return a vector of little-endian fp32 as JSON.

    Each call into C encodes only one vector, so that it does not hold the interpreter for long (see
    `off_loop`).
    """
    return msgspec.Raw(msgspec.json.encode(struct.unpack(f"<{len(vector) // 4}f", vector)))


def _sparse(places: bytes, vector: bytes) -> msgspec.Raw:
    """Return the numbers of a sparse vector as JSON, each with its place."""
    num = len(vector) // 4
    pairs = zip(struct.unpack(f"<{num}i", places), struct.unpack(f"<{num}f", vector), strict=True)
    return msgspec.Raw(
        msgspec.json.encode([{"index": place, "value": value} for place, value in pairs])
    )


_EMBEDDING = Body("Embedding", EMBEDDING_FIELDS, ("input",), title="`/v1/embeddings`")
INVOCATION = Invocation(
    "embedding", read, answer, (Body("Inputs", INPUTS_FIELDS, ("inputs",)), _EMBEDDING)
)
EMBEDDINGS = Api(
    "OpenAI",
    (
        post("/v1/embeddings", "OpenAI's embeddings.", embeddings, _EMBEDDING),
    ),
    kinds=("embedding",),
)  # fmt: skip
EMBED = Api(
    "text-embeddings-inference",
    (
        post("/embed", "text-embeddings-inference's embeddings.", embed,
             Body("Embed", EMBED_FIELDS, ("inputs",), title="`/embed`")),
        post("/embed_sparse", "text-embeddings-inference's sparse embeddings.", embed_sparse,
             Body("EmbedSparse", SPARSE_FIELDS, ("inputs",))),
    ),
    kinds=("embedding",),
)  # fmt: skip
