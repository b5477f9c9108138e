"""OpenAI's completions API: requests with `prompt`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from container.apis.completions.response import CompletionsResponse
from container.apis.completions.schema import CompletionRequest, read_completion_request
from container.apis.generation.response import ApiResponse
from container.apis.generation.service import GenerationService
from container.apis.openai import Envelope
from container.http.request_context import RequestContext


class CompletionsApi:
    """Answers requests that have one or more prompts."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    def start(self, context: RequestContext, body: Mapping[str, object]) -> ApiResponse:
        """Start to answer a body with `prompt`."""
        service = self._service
        request = context.checked(lambda: read_completion_request(body))
        context.warn(request.warnings)
        adapter = service.adapter(context, request.adapter, request.model)
        prompts = self._encode(request)
        echoes = self._echoes(request) if request.echo else [""] * len(prompts)
        decoding = service.for_engine(request.decoding)
        generations = service.start(context, prompts, decoding, adapter=adapter)
        return CompletionsResponse(
            generations,
            request,
            Envelope(
                f"cmpl-{request.response_options.request_id or context.id}",
                int(time.time()),
                adapter or service.model_name,
            ),
            echoes,
            service.prompting.tokenizer,
        )

    def _encode(self, request: CompletionRequest) -> list[Sequence[int]]:
        """Return the token ids of each prompt. Raises RequestError if a text is too long."""
        prompting = self._service.prompting
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        for text in texts:
            prompting.check_length(text, "prompt")
        encoded = iter(prompting.encode(texts, add_special_tokens=request.add_special_tokens))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in request.prompts]

    def _echoes(self, request: CompletionRequest) -> list[str]:
        decode = self._service.prompting.decode
        return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in request.prompts]
