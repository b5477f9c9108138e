"""The schema of transformers' pipelines, as LMI and the Hugging Face toolkit have it."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import cast

from container.schemas.fields import Field, Fields, ignored, read_fields
from container.schemas.kinds import OBJECT, Kind, is_list
from core.errors import RequestError
from core.suggest import did_you_mean
from core.task import IMAGE_TASKS, SOUND_TASKS, SPEECH_RECOGNITION
from core.task_bodies import PipelineBody

MAX_BATCH = 1024

_INPUT = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "object"}]}
_INPUTS = Kind(
    "a text, an object or a list of them",
    lambda _: True,  # checked one by one, so that one of a list can fail alone
    {"anyOf": [_INPUT, {"type": "array", "items": _INPUT, "minItems": 1, "maxItems": MAX_BATCH}]},
)
PIPELINE_FIELDS: Fields = {
    "inputs": Field(
        _INPUTS, "A text, an object such as a question with its context, or a list of them; images "
        "and sounds in base64."
    ),
    "parameters": Field(OBJECT, "Parameters of the task, as transformers' pipeline names them."),
    "options": ignored("Options of Hugging Face's hosted API."),
    "model": ignored("One model is served."),
}  # fmt: skip

_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "text-classification": ("top_k", "function_to_apply", "truncation", "max_length"),
    "token-classification": ("aggregation_strategy", "ignore_labels", "stride",
                             "is_split_into_words", "delimiter"),
    "fill-mask": ("top_k", "targets", "tokenizer_kwargs"),
    "feature-extraction": ("truncation", "tokenize_kwargs"),
    "zero-shot-classification": ("candidate_labels", "hypothesis_template", "multi_label"),
    "question-answering": ("top_k", "doc_stride", "max_answer_len", "max_seq_len",
                           "handle_impossible_answer"),
    "image-classification": ("top_k", "function_to_apply"),
    "zero-shot-image-classification": ("candidate_labels", "hypothesis_template"),
    "object-detection": ("threshold",),
    "zero-shot-object-detection": ("candidate_labels", "threshold", "top_k"),
    "audio-classification": ("top_k", "function_to_apply"),
    SPEECH_RECOGNITION: ("return_timestamps", "return_language", "chunk_length_s",
                         "stride_length_s"),
}  # fmt: skip
"""By task. Another task takes whatever its pipeline does, but how it is computed is not for a
request to say."""
_OF_THE_SERVER = ("batch_size", "num_workers", "timeout")
_FILES = {**dict.fromkeys(IMAGE_TASKS, "image"), **dict.fromkeys(SOUND_TASKS, "audio")}
"""What the inputs of a task are files of, as Content-Types say it."""
_DATA_URI = re.compile("data:(image|audio)/[a-z0-9.+-]+;base64,", re.IGNORECASE)


def is_file_type(content_type: str, task: str) -> bool:
    """Whether a body of this Content-Type is what the task works on, or may be."""
    kind = _FILES.get(task)
    is_one = kind is not None and content_type.startswith(f"{kind}/")
    return is_one or (kind is not None and content_type == "application/octet-stream")


def read_pipeline_request(
    body: Mapping[str, object], task: str
) -> tuple[PipelineBody, tuple[str, ...]]:
    """The checked request, and what of it was passed over.

    Raises RequestError that names the first mistake.
    """
    values = read_fields(body, PIPELINE_FIELDS)
    given = body.get("inputs")
    is_batch = is_list(given)
    inputs = given if is_list(given) else [given]
    if not 0 < len(inputs) <= MAX_BATCH:
        raise RequestError("inputs", f"a batch has 1 to {MAX_BATCH} inputs, not {len(inputs)}")
    kind = _FILES.get(task)
    checked = [
        _text_or_object(each, field) if kind is None else _file(each, field, kind)
        for at, each in enumerate(inputs)
        for field in [f"inputs[{at}]" if is_batch else "inputs"]
    ]
    parameters: Mapping[str, object] = values.get("parameters", {})
    _check_parameters(parameters, task)
    return PipelineBody(checked, is_batch, parameters), values.warnings


def _check_parameters(parameters: Mapping[str, object], task: str) -> None:
    known = _PARAMETERS.get(task)
    for name in parameters:
        if name in _OF_THE_SERVER or (known is not None and name not in known):
            raise RequestError(
                f"parameters.{name}", f"no such field{did_you_mean(name, known or ())}"
            )


def _text_or_object(value: object, field: str) -> object:
    if not value or not isinstance(value, str | dict):
        raise RequestError(field, "expected a text or an object that is not empty")
    return cast(object, value)


def _file(value: object, field: str, kind: str) -> object:
    """The bytes of an image's or a sound's file."""
    if isinstance(value, bytes):
        return value
    if not value or not isinstance(value, str):
        raise RequestError(field, f"expected an {kind} in base64")
    if value.lower().startswith(("http://", "https://")):
        raise RequestError(field, f"addresses are not fetched; send the {kind} itself, in base64")
    try:
        return base64.b64decode(_DATA_URI.sub("", value, count=1), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(field, "is not base64") from None
