"""text-generation-inference's routes: /generate, /generate_stream, / and /info."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from flask import Response

from container.apis.generation.reply import ApiResponse
from container.apis.generation.service import GenerationService, generates
from container.apis.generation.stream import EVENTS
from container.apis.text.api import start_text
from container.apis.text.schema import PARAMETERS, TEXT_FIELDS
from container.apis.text.tgi_response import TgiFormat, TgiListFormat, tgi_error
from container.http.request_context import RequestContext
from container.http.route import Api, Body, Errors, get, post
from container.http.service import json_response
from core.configuration.limits import STOP_STRINGS
from core.sampling import MAX_SAMPLES


def start_list(
    service: GenerationService, context: RequestContext, body: Mapping[str, object]
) -> ApiResponse:
    """Start to answer with a list of one document, or with a stream if the body wants one."""
    return start_text(service.generations, context, body, TgiListFormat)


def start_document(
    service: GenerationService, context: RequestContext, body: Mapping[str, object]
) -> ApiResponse:
    return start_text(service.generations, context, {**body, "stream": False}, TgiFormat)


def start_stream(
    service: GenerationService, context: RequestContext, body: Mapping[str, object]
) -> ApiResponse:
    return start_text(service.generations, context, {**body, "stream": True}, TgiFormat)


def info(service: GenerationService) -> Response:
    """Describe the model and the limits of requests."""
    facts = service.client.facts
    return json_response(
        {
            "model_id": facts.model,
            "model_sha": None,
            "model_dtype": facts.dtype,
            "model_device_type": facts.device,
            "model_pipeline_tag": facts.task,
            "max_concurrent_requests": service.options.server.job_queue_size,
            "max_best_of": MAX_SAMPLES,
            "max_stop_sequences": STOP_STRINGS.maximum,
            "max_input_tokens": facts.max_model_len - 1,
            "max_total_tokens": facts.max_model_len,
            "max_batch_total_tokens": facts.num_kv_blocks * facts.block_size,
            "version": importlib.metadata.version("longshore"),
            "router": "longshore",
        }
    )


TEXT_BODY = Body(
    "Text",
    TEXT_FIELDS,
    ("inputs",),
    title="`/invocations` with `inputs`, `/generate`",
    parts={
        "parameters": Body(
            "Parameters", PARAMETERS, title="The `parameters` of `/invocations` and `/generate`"
        )
    },
)
TGI = Api(
    "text-generation-inference",
    (
        post("/", "text-generation-inference's answer, in a list or as a stream.",
             generates(start_list, EVENTS), TEXT_BODY),
        post("/generate", "text-generation-inference's answer.", generates(start_document, EVENTS),
             TEXT_BODY),
        post("/generate_stream", "text-generation-inference's answer as a stream.",
             generates(start_stream, EVENTS), TEXT_BODY),
        get("/info", "Describe the model and the limits, as text-generation-inference does.", info),
    ),
    errors=Errors(tgi_error, ("/generate",)),
)  # fmt: skip
