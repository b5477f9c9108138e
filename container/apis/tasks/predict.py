"""text-embeddings-inference's /predict: the labels of texts, or of pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from flask import Response

from container.apis.named_model import MODEL_FIELDS, read_model
from container.apis.tasks.rerank import TASK, PairError, refusal
from container.apis.tasks.service import TaskService
from container.http.request_context import request_context
from container.http.route import Api, Body, post
from container.http.service import json_response
from container.schema.fields import Field, Fields, read_fields
from container.schema.kinds import BOOLEAN, Kind, is_list, is_strings
from core.configuration.limits import INPUTS, TASK_TEXT, TASK_TEXTS
from core.errors import GenerationError, RequestError
from core.protocol.task_bodies import PipelineBody

_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}
_SEQUENCES = Kind(
    "a string, a pair of strings, or a list of lists of one or two strings",
    lambda value: isinstance(value, str) or _is_texts(value) or _is_batch(value),
    {"anyOf": [{"type": "string"}, _TEXTS, {"type": "array", "items": _TEXTS, "minItems": 1}]},
)
PREDICT_FIELDS: Fields = {
    "inputs": Field(
        _SEQUENCES, "A text, a pair of texts, or a list of lists that hold one text or a pair."
    ),
    "raw_scores": Field(BOOLEAN, "Return logits instead of probabilities."),
    "truncate": Field(BOOLEAN, "Cut texts that are too long for the model (default false)."),
    **MODEL_FIELDS,
}


class _Prediction(msgspec.Struct):
    score: float
    label: str


def predict(service: TaskService) -> Response:
    """Return all labels of each text or pair, the most likely first."""
    context = request_context()
    values = read_fields(context.json_fields(), PREDICT_FIELDS)
    if service.task.name != TASK:
        raise RequestError("model", f"is for {service.task.name}; /predict needs {TASK}")
    context.warn(values.warnings)
    given: object = values.get("inputs", "")
    is_batch = _is_batch(given)
    inputs = [_read(texts) for texts in (given if is_list(given) and is_batch else [given])]
    INPUTS.check("inputs", len(inputs))
    TASK_TEXTS.check("inputs", sum(len(text) for texts in inputs for text in texts.values()))
    parameters: dict[str, object] = {"top_k": None}
    if values.get("raw_scores", False):
        parameters["function_to_apply"] = "none"
    if values.get("truncate", False):
        parameters["truncation"] = True
    variant = service.variant(context, read_model(values))
    try:
        reply = service.perform(context, PipelineBody(list(inputs), True, parameters), variant)
    except RequestError as error:  # every input is wrong
        raise refusal(error.message, "inputs") from error
    results = msgspec.json.decode(reply.body, type=list[list[_Prediction] | PairError])
    predictions = list(map(_predictions, results))
    return json_response(predictions if is_batch else predictions[0])


def _is_texts(value: object) -> bool:
    return is_strings(value) and 1 <= len(value) <= 2


def _is_batch(value: object) -> bool:
    return is_list(value) and bool(value) and all(map(_is_texts, value))


def _read(value: object) -> Mapping[str, str]:
    """Return a text or a pair of texts as the pipeline takes them."""
    texts = value if is_strings(value) else [str(value)]
    if not all(texts):
        raise RequestError("inputs", "expected no empty text")
    for text in texts:
        TASK_TEXT.check("inputs", len(text))
    return dict(zip(("text", "text_pair"), texts, strict=False))


def _predictions(result: list[_Prediction] | PairError) -> list[_Prediction]:
    match result:
        case PairError(error, 400):
            raise refusal(error.removeprefix("inputs: "), "inputs")
        case PairError(error):
            raise GenerationError(error)
        case labels:
            return labels


PREDICT = Api(
    "text-embeddings-inference",
    (
        post("/predict", "Classify texts, or pairs of texts.", predict,
             Body("Predict", PREDICT_FIELDS, ("inputs",), title="`/predict`")),
    ),
    kinds=("pipeline",),
)  # fmt: skip
