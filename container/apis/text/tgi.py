"""text-generation-inference's routes: /generate, /generate_stream, / and /info."""

from __future__ import annotations

import importlib.metadata

from flask import Flask, Response

from container.apis.generation.service import GenerationService
from container.apis.text.api import TextApi
from container.http.request_context import request_context
from container.http.service import json_response
from core.configuration.limits import STOP_STRINGS
from core.sampling import MAX_SAMPLES


class TgiRoutes:
    """The routes that text-generation-inference's clients call."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._one = TextApi(service, "generate")
        self._list = TextApi(service, "tgi")

    def add_to(self, app: Flask) -> None:
        app.add_url_rule("/", view_func=self.root, methods=["POST"])
        app.add_url_rule("/generate", view_func=self.generate, methods=["POST"])
        app.add_url_rule("/generate_stream", view_func=self.generate_stream, methods=["POST"])
        app.add_url_rule("/info", view_func=self.info)

    def root(self) -> Response:
        """Answer with a list of one document, or with a stream if `stream` is true in the body."""
        context = request_context()
        response = self._list.start(context, context.json_fields())
        return self._service.send(context, response, "sse")

    def generate(self) -> Response:
        """Answer with one document."""
        context = request_context()
        response = self._one.start(context, {**context.json_fields(), "stream": False})
        return self._service.send(context, response, "sse")

    def generate_stream(self) -> Response:
        context = request_context()
        response = self._one.start(context, {**context.json_fields(), "stream": True})
        return self._service.send(context, response, "sse")

    def info(self) -> Response:
        """Describe the model and the limits of requests."""
        facts = self._service.client.facts
        return json_response(
            {
                "model_id": facts.model,
                "model_sha": None,
                "model_dtype": facts.dtype,
                "model_device_type": facts.device,
                "model_pipeline_tag": facts.task,
                "max_concurrent_requests": self._service.options.server.job_queue_size,
                "max_best_of": MAX_SAMPLES,
                "max_stop_sequences": STOP_STRINGS.maximum,
                "max_input_tokens": facts.max_model_len - 1,
                "max_total_tokens": facts.max_model_len,
                "max_batch_total_tokens": facts.num_kv_blocks * facts.block_size,
                "version": importlib.metadata.version("longshore"),
                "router": "longshore",
            }
        )
