"""The schema of transformers' pipelines, as LMI and the Hugging Face toolkit have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from container.apis.tasks.pipeline_inputs import read_input
from container.schema.fields import Field, Fields, ignored, read_fields
from container.schema.kinds import OBJECT, Kind, is_integer, is_list
from core.errors import RequestError
from core.pipeline_tasks import FILES, PIPELINE_TASKS, PipelineTask
from core.suggest import did_you_mean
from core.task_bodies import PipelineBody

MAX_BATCH = 1024
SOUND = "audio/wav"

_INPUT = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "object"}]}
_INPUTS = Kind(
    "a text, an object or a list of them",
    lambda _: True,  # checked one by one, so that one of a list can fail alone
    {"anyOf": [_INPUT, {"type": "array", "items": _INPUT, "minItems": 1, "maxItems": MAX_BATCH}]},
)
PIPELINE_FIELDS: Fields = {
    "inputs": Field(
        _INPUTS, "A text, an object such as a question with its context, or a list of them; "
        "images, sounds and videos are in base64."
    ),
    "parameters": Field(OBJECT, "Parameters of the task, as transformers' pipeline names them."),
    "options": ignored("Options of Hugging Face's hosted API."),
    "model": ignored("One model is served."),
}  # fmt: skip

_GENERATION = ("max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p",
               "min_p", "typical_p", "num_beams", "length_penalty", "early_stopping",
               "repetition_penalty", "no_repeat_ngram_size")  # fmt: skip
_NESTED: Mapping[str, tuple[str, ...]] = {
    "generate_kwargs": _GENERATION,
    "forward_params": ("speaker_id",),
}
"""Objects among the parameters. Their other fields in transformers name files and code to load."""
_RANGES: Mapping[str, range] = {
    "num_frames": range(1, 129),
    "frame_sampling_rate": range(1, 129),
    "points_per_batch": range(1, 1025),
    "points_per_crop": range(1, 65),
    "crops_n_layers": range(4),
    "max_new_tokens": range(1, 8193),
    "num_beams": range(1, 17),
}
"""What one request may ask for, however much memory there is."""


def is_file_type(content_type: str, task: str) -> bool:
    """Whether a body of this Content-Type is what the task works on, or may be."""
    reads = _task(task).reads
    kind = FILES.get(reads) if isinstance(reads, str) else None
    is_one = kind is not None and content_type.startswith(f"{kind}/")
    return is_one or (kind is not None and content_type == "application/octet-stream")


def read_pipeline_request(
    body: Mapping[str, object], task: str, accept: str | None = None
) -> tuple[PipelineBody, tuple[str, ...]]:
    """The checked request, and what of it was passed over; `accept` is what the client takes.

    Raises RequestError that names the first mistake.
    """
    values = read_fields(body, PIPELINE_FIELDS)
    given = body.get("inputs")
    is_batch = is_list(given)
    inputs = given if is_list(given) else [given]
    if not 0 < len(inputs) <= MAX_BATCH:
        raise RequestError("inputs", f"a batch has 1 to {MAX_BATCH} inputs, not {len(inputs)}")
    its_task = _task(task)
    checked = [
        read_input(each, f"inputs[{at}]" if is_batch else "inputs", its_task)
        for at, each in enumerate(inputs)
    ]
    parameters: Mapping[str, object] = values.get("parameters", {})
    _check_parameters(parameters, its_task.parameters)
    wants_sound = its_task.writes_sound and _wants_sound(accept)
    if wants_sound and is_batch:
        raise RequestError("inputs", f"{SOUND} is one sound; take JSON for a list of them")
    return PipelineBody(checked, is_batch, parameters, wants_sound), values.warnings


def _wants_sound(accept: str | None) -> bool:
    """JSON is for who takes both alike."""
    return parse_accept_header(accept, MIMEAccept).best_match(["application/json", SOUND]) == SOUND


def _task(name: str) -> PipelineTask:
    """The engine refuses, at start, what is not in the table."""
    return PIPELINE_TASKS.get(name, PipelineTask())


def _check_parameters(
    parameters: Mapping[str, object], known: Sequence[str], prefix: str = "parameters."
) -> None:
    for name, value in parameters.items():
        field = f"{prefix}{name}"
        if name not in known:
            raise RequestError(field, f"no such field{did_you_mean(name, known)}")
        if name in _NESTED:
            if not OBJECT.holds(value):
                raise RequestError(field, "expected an object")
            _check_parameters(cast(Mapping[str, object], value), _NESTED[name], f"{field}.")
        allowed = _RANGES.get(name)
        if allowed is not None and not (is_integer(value) and value in allowed):
            raise RequestError(
                field, f"expected an integer from {allowed.start} to {allowed.stop - 1}"
            )
