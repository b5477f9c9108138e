"""Ranks texts, and scores pairs of texts, with cross-encoders.

The routes are vLLM's, which follow Cohere's and Jina's. A body with `query` and `texts` has the
format of text-embeddings-inference and DJL Serving.

The model is a text-classification model with one label. The score is the label's probability or,
with `raw_scores`, its logit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
from flask import Response

from container.apis.named_model import MODEL_FIELDS, read_model
from container.apis.tasks.service import TaskService
from container.http.request_context import RequestContext, request_context
from container.http.route import Api, Body, post
from container.http.service import json_response
from container.schema.fields import Field, Fields, Values, ignored, read_fields
from container.schema.kinds import (
    BOOLEAN,
    MAX_COUNT,
    STRING,
    STRING_OR_STRINGS,
    STRINGS,
    Kind,
    integer,
    is_list,
)
from core.configuration.limits import TASK_TEXT, TASK_TEXTS
from core.errors import GenerationError, RequestError
from core.protocol.task_bodies import PipelineBody

TASK = "text-classification"
MAX_TEXTS = 1024

_TEXT = {"anyOf": [{"type": "string"}, {"type": "object", "required": ["text"],
                   "properties": {"text": {"type": "string"}}}]}  # fmt: skip
_DOCUMENTS = Kind(
    "a list of strings or of objects with text",
    lambda value: is_list(value) and all(_text(item) is not None for item in value),
    {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_TEXTS},
)
_COMMON: Fields = {
    "truncate": Field(BOOLEAN, "Cut pairs that are too long for the model (default false)."),
    **MODEL_FIELDS,
    "user": ignored(),
}
RERANK_FIELDS: Fields = {
    **_COMMON,
    "query": Field(STRING, "The text to which the documents are compared."),
    "documents": Field(_DOCUMENTS, "The texts to rank."),
    "top_n": Field(
        integer(0, MAX_COUNT), "Return only this many of the best results. 0 (default): return all."
    ),
    "return_documents": Field(BOOLEAN, "Return the texts too (default true)."),
}
TEXTS_FIELDS: Fields = {
    **_COMMON,
    "query": Field(STRING, "The text to which the texts are compared."),
    "texts": Field(STRINGS, "The texts to rank."),
    "raw_scores": Field(BOOLEAN, "Return logits instead of probabilities."),
    "return_text": Field(BOOLEAN, "Return the texts too."),
}
SCORE_FIELDS: Fields = {
    **_COMMON,
    "text_1": Field(
        STRING_OR_STRINGS, "A text to pair with every text of text_2, or one text for each of them."
    ),
    "text_2": Field(STRING_OR_STRINGS, "The text or texts to pair with text_1."),
}


class _Label(msgspec.Struct):
    score: float


class PairError(msgspec.Struct):
    """The error of one input of a list, as the engine describes it."""

    error: str
    code: int


def rerank(service: TaskService) -> Response:
    """Handle vLLM's routes, and text-embeddings-inference's if the body has `texts`."""
    context = request_context()
    return rank(service, context, context.json_fields())


def score(service: TaskService) -> Response:
    """Handle vLLM's routes to score pairs."""
    context = request_context()
    values = read_fields(context.json_fields(), SCORE_FIELDS)
    first, second = _texts(values, "text_1"), _texts(values, "text_2")
    if len(first) not in (1, len(second)):
        raise RequestError("text_1", f"expected one text, or {len(second)} as in text_2")
    pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
    model, scores = _scores(service, context, values, pairs, "text_2")
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    return json_response({**_envelope(model, "score", context), "object": "list", "data": data})


def rank(service: TaskService, context: RequestContext, body: Mapping[str, object]) -> Response:
    """Answer a body with `query` and `documents`, or with `query` and `texts`."""
    is_texts = "texts" in body
    values = read_fields(body, TEXTS_FIELDS if is_texts else RERANK_FIELDS)
    field = "texts" if is_texts else "documents"
    documents = _texts(values, field)
    (query,) = _texts(values, "query")
    top_n = values.get("top_n", 0)
    pairs = [(query, document) for document in documents]
    model, scores = _scores(service, context, values, pairs, field)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    if is_texts:
        shows_text = values.get("return_text", False)
        return json_response(
            [
                {"index": index, "score": scores[index]}
                | ({"text": documents[index]} if shows_text else {})
                for index in ranked
            ]
        )
    shows = values.get("return_documents", True)
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if shows else {})
        for index in ranked[: top_n or None]
    ]
    return json_response({**_envelope(model, "rerank", context), "results": results})


def _envelope(model: str, kind: str, context: RequestContext) -> dict[str, object]:
    id, created = f"{kind}-{context.id}", int(time.time())
    return {"id": id, "created": created, "model": model}


def _scores(
    service: TaskService,
    context: RequestContext,
    values: Values,
    pairs: Sequence[tuple[str, str]],
    field: str,
) -> tuple[str, list[float]]:
    """Return the name of the model that answers, and a score for each pair.

    field: the request's field with the texts, for errors.
    Raises RequestError if the model cannot take a pair, or is not a cross-encoder.
    """
    if service.task.name != TASK:
        raise RequestError("model", f"is for {service.task.name}; scores need {TASK}")
    context.warn(values.warnings)
    function = "none" if values.get("raw_scores", False) else "sigmoid"
    # Two labels are enough to see that the model has more than one.
    parameters: dict[str, object] = {"top_k": 2, "function_to_apply": function}
    if values.get("truncate", False):
        parameters["truncation"] = True
    for first, second in pairs:
        TASK_TEXT.check(field, max(len(first), len(second)))
    TASK_TEXTS.check(field, sum(len(first) + len(second) for first, second in pairs))
    inputs: list[object] = [{"text": first, "text_pair": second} for first, second in pairs]
    variant = service.variant(context, read_model(values))
    try:
        reply = service.perform(context, PipelineBody(inputs, True, parameters), variant)
    except RequestError as error:  # every pair is wrong
        raise refusal(error.message, field) from error
    results = msgspec.json.decode(reply.body, type=list[list[_Label] | PairError])
    return variant or service.model_name, [_score(result, field) for result in results]


def _score(result: list[_Label] | PairError, field: str) -> float:
    match result:
        case [label]:
            return label.score
        case PairError(error, 400):
            raise refusal(error.removeprefix("inputs: "), field)
        case PairError(error):
            raise GenerationError(error)
        case _:
            raise RequestError("model", "has several labels; scores need a model with one")


def refusal(message: str, field: str) -> RequestError:
    """Return the pipeline's error with the names that the client knows."""
    return RequestError(field, message.replace("parameters.truncation", "truncate"))


def _text(value: object) -> str | None:
    match value:
        case str():
            return value
        case {"text": str(text)}:
            return text
        case _:
            return None


def _texts(values: Values, field: str) -> list[str]:
    given = values.given.get(field)
    items = cast(list[object], given if isinstance(given, list) else [given])
    texts = [text for text in map(_text, items) if text]
    if not texts or len(texts) < len(items):
        raise RequestError(field, "expected at least one text, and no empty text")
    if len(texts) > MAX_TEXTS:
        raise RequestError(field, f"at most {MAX_TEXTS} texts are allowed in a request")
    return texts


_RANK = "Rank texts by their score for a query."
_SCORE = "Score pairs of texts."
RANKED_BODIES = (
    Body("Rerank", RERANK_FIELDS, ("query", "documents"), title="`/v1/rerank`"),
    Body("Texts", TEXTS_FIELDS, ("query", "texts")),
)
_PAIRS = (Body("Score", SCORE_FIELDS, ("text_1", "text_2"), title="`/v1/score`"),)
TEI_RERANK = Api(
    "vLLM, text-embeddings-inference",
    (
        post("/rerank", _RANK, rerank, *RANKED_BODIES),
    ),
    kinds=("pipeline",),
)  # fmt: skip
VLLM_SCORES = Api(
    "vLLM",
    (
        post("/v1/rerank", _RANK, rerank, *RANKED_BODIES),
        post("/v2/rerank", _RANK, rerank, *RANKED_BODIES),
        post("/score", _SCORE, score, *_PAIRS),
        post("/v1/score", _SCORE, score, *_PAIRS),
    ),
    kinds=("pipeline",),
)  # fmt: skip
