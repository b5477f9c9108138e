"""Vectors of texts: OpenAI's embeddings, and `inputs`."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping

import msgspec
from flask import Flask, Response

from container.apis.embeddings.schema import (
    EmbeddingRequest,
    read_embedding_request,
    read_inputs_request,
)
from container.apis.tasks.host import TaskHost
from container.http.host import json_response
from core.task_bodies import EmbeddingAnswer


class EmbeddingApi:
    """Both schemas."""

    def __init__(self, host: TaskHost) -> None:
        self._host = host

    def add_to(self, app: Flask) -> None:
        """Adds OpenAI's route."""
        app.add_url_rule("/v1/embeddings", view_func=self.embeddings, methods=["POST"])

    def read(self) -> Mapping[str, object]:
        """The fields of a body of any served type."""
        return self._host.read()

    def answer(self, body: Mapping[str, object], accept: str | None) -> Response:
        """A list of vectors for `inputs`; `input` is answered as OpenAI does."""
        if "input" in body:
            return self._openai(body)
        vectors = self._perform(read_inputs_request(body)).vectors
        return json_response(list(map(_numbers, vectors)))

    def embeddings(self) -> Response:
        """OpenAI's."""
        return self._openai(self._host.read_json())

    def _openai(self, body: Mapping[str, object]) -> Response:
        asked = read_embedding_request(body)
        answer = self._perform(asked)
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(each).decode() if asked.is_base64 else _numbers(each),
            }
            for index, each in enumerate(answer.vectors)
        ]
        num_tokens = sum(answer.num_tokens)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        model = self._host.model_name
        return json_response({"object": "list", "data": data, "model": model, "usage": usage})

    def _perform(self, asked: EmbeddingRequest) -> EmbeddingAnswer:
        self._host.warn(asked.warnings)
        answer = self._host.perform(msgspec.msgpack.encode(asked.body))
        return msgspec.msgpack.decode(answer.body, type=EmbeddingAnswer)


def _numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)
