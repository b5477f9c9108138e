"""OpenAI's completions API: requests with `prompt`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from container.apis.completions.prompts import PromptDeltas
from container.apis.completions.response import CompletionFormat
from container.apis.completions.schema import (
    COMPLETION_FIELDS,
    CompletionRequest,
    read_completion_request,
)
from container.apis.generation.generation import Generation
from container.apis.generation.generations import Generations
from container.apis.generation.prompting import Prompting
from container.apis.generation.reply import Reply
from container.apis.generation.sampling import Decoding
from container.apis.generation.service import GenerationService, generates
from container.apis.generation.stream import EVENTS
from container.apis.openai import Envelope
from container.http.off_loop import Turns
from container.http.request_context import RequestContext
from container.http.route import Api, Body, post
from core.protocol.messages import EncodedPrompt


def start_completion(
    service: GenerationService, context: RequestContext, body: Mapping[str, object]
) -> Reply:
    """Start to answer a body with `prompt`, which is one prompt or several."""
    request = context.read(lambda: read_completion_request(body))
    variant = service.generations.choose_variant(context, *request.model)
    prompts = _encode(service.prompting, request)
    echoes = _echoes(service.prompting, request) if request.echo else [""] * len(prompts)
    decoding = service.generations.prepare(request.decoding)
    generations = _start_all(service.generations, context, prompts, decoding, variant)
    id = f"cmpl-{request.response_options.request_id or context.id}"
    model = variant or service.model_name
    envelope = Envelope(id, int(time.time()), model, context.digest)
    tokenizer = service.prompting.tokenizer
    format = CompletionFormat(generations, request, envelope, echoes, tokenizer)
    return Reply(format, PromptDeltas(generations), stream=request.stream)


def _start_all(
    starter: Generations,
    context: RequestContext,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    variant: str,
) -> list[Generation]:
    """Submit a request for each prompt to the engine. If one is refused, none runs."""
    generations: list[Generation] = []
    turns = Turns()
    try:
        for prompt in prompts:
            turns.give()
            encoded = EncodedPrompt(prompt)
            generations.append(starter.start(context, encoded, decoding, variant=variant))
    except BaseException:
        for generation in generations:
            generation.abort("refused")
        raise
    return generations


def _encode(prompting: Prompting, request: CompletionRequest) -> list[Sequence[int]]:
    """Return the token ids of each prompt. Raises RequestError if a text is too long."""
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    for text in texts:
        prompting.check_length(text, "prompt")
    encoded = iter(prompting.encode_all(texts, add_special_tokens=request.add_special_tokens))
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in request.prompts]


def _echoes(prompting: Prompting, request: CompletionRequest) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else prompting.decode(prompt)
        for prompt in request.prompts
    ]


COMPLETION_BODY = Body("Completion", COMPLETION_FIELDS, ("prompt",), title="`/v1/completions`")
COMPLETIONS = Api(
    "OpenAI",
    (
        post("/v1/completions", "OpenAI's completions.", generates(start_completion, EVENTS),
             COMPLETION_BODY),
    ),
)  # fmt: skip
