"""Requests to transformers' pipelines, in the schema of LMI and the Hugging Face toolkit.

A body has `inputs` and `parameters`, or it is the bytes of a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from flask import Response
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from container.apis.named_model import MODEL_FIELDS, NamedModel, read_model
from container.apis.tasks.pipeline_inputs import num_characters, read_input
from container.apis.tasks.pipeline_parameters import read_parameters
from container.apis.tasks.rerank import RANKED_BODIES, rank
from container.apis.tasks.service import TaskService
from container.http.request_context import RequestContext
from container.http.route import Body, Invocation
from container.schema.fields import Field, Fields, ignored, read_fields
from container.schema.kinds import OBJECT, Kind, is_list
from core.configuration.limits import INPUTS, TASK_TEXTS
from core.configuration.pipeline_tasks import FILES, PIPELINE_TASKS, PipelineTask
from core.errors import RequestError
from core.protocol.task_bodies import PipelineBody

AUDIO_TYPE = "audio/wav"
MAX_BATCH = INPUTS.maximum

_INPUT = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "object"}]}
_INPUTS = Kind(
    "a string, an object or a list of them",
    lambda _: True,  # `read_input` checks each input
    {
        "anyOf": [
            _INPUT,
            {"type": "array", "items": _INPUT, "minItems": 1, "maxItems": MAX_BATCH},
        ]
    },
)
PIPELINE_FIELDS: Fields = {
    "inputs": Field(
        _INPUTS, "A string, an object such as a question with its context, or a list of them. "
        "Images, audio and video are in base64."
    ),
    "parameters": Field(OBJECT, "The parameters of transformers' pipeline for the task."),
    "options": ignored("Options of Hugging Face's hosted API."),
    **MODEL_FIELDS,
}  # fmt: skip


def read_pipeline_request(
    body: Mapping[str, object], task: str, accept: str | None = None
) -> tuple[PipelineBody, NamedModel, tuple[str, ...]]:
    """Return the checked request, the model that it names, and its warnings.

    `accept` is the client's Accept header. Raises RequestError that names the first bad field.
    """
    values = read_fields(body, PIPELINE_FIELDS)
    given = body.get("inputs")
    is_batch = is_list(given)
    inputs = given if is_list(given) else [given]
    if not 0 < len(inputs) <= MAX_BATCH:
        raise RequestError("inputs", f"expected 1 to {MAX_BATCH} inputs, not {len(inputs)}")
    pipeline_task = _pipeline_task(task)
    checked = [
        read_input(value, f"inputs[{index}]" if is_batch else "inputs", pipeline_task)
        for index, value in enumerate(inputs)
    ]
    TASK_TEXTS.check("inputs", num_characters(checked))
    given_parameters: Mapping[str, object] = values.get("parameters", {})
    parameters = read_parameters(given_parameters, pipeline_task.parameters, len(checked))
    wants_audio = pipeline_task.writes_sound and _prefers_audio(accept)
    if wants_audio and is_batch:
        raise RequestError("inputs", f"a list cannot be answered as {AUDIO_TYPE}; accept JSON")
    request = PipelineBody(checked, is_batch, parameters, wants_audio)
    return request, read_model(values), values.warnings


def _is_file_type(mimetype: str, task: PipelineTask) -> bool:
    """Return whether a body of this type is the file that the task takes as its input."""
    kind = FILES.get(task.reads) if isinstance(task.reads, str) else None
    if kind is None:
        return False
    return mimetype.startswith(f"{kind}/") or mimetype == "application/octet-stream"


def _prefers_audio(accept: str | None) -> bool:
    accepted = parse_accept_header(accept, MIMEAccept)
    return accepted.best_match(["application/json", AUDIO_TYPE]) == AUDIO_TYPE


def _pipeline_task(name: str) -> PipelineTask:
    # The default is never served: the engine refuses to start with a task that is not in the table.
    return PIPELINE_TASKS.get(name, PipelineTask())


def read(service: TaskService, context: RequestContext) -> Mapping[str, object]:
    """Parse the body. The bytes of an image, audio or video file become `inputs`."""
    if _is_file_type(context.mimetype, _pipeline_task(service.task.name)):
        return {"inputs": context.body}
    return context.fields()


def answer(service: TaskService, context: RequestContext, body: Mapping[str, object]) -> Response:
    """Return the pipeline's answer to `inputs`, or a ranking of texts for a `query`."""
    if "query" in body and "inputs" not in body:
        return rank(service, context, body)
    task, accept = service.task.name, context.accept
    request, model, warnings = context.checked(lambda: read_pipeline_request(body, task, accept))
    context.warn(warnings)
    answer = service.perform(context, request, service.variant(context, model))
    return Response(answer.body, answer.code, content_type=answer.content_type)


INVOCATION = Invocation(
    "pipeline",
    read,
    answer,
    (Body("Pipeline", PIPELINE_FIELDS, ("inputs",)), *RANKED_BODIES),
    tuple(FILES.values()),
)
