"""Tasks of transformers' pipelines: `inputs` and `parameters`, or the bytes of a file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from flask import Response, request

from container.apis.tasks.host import TaskHost
from container.apis.tasks.pipeline_schema import is_file_type, read_pipeline_request
from core.task import Task


class PipelineApi:
    """Answers as transformers' pipeline does."""

    def __init__(self, host: TaskHost, task: Task) -> None:
        self._host = host
        self._task = task

    def read(self) -> Mapping[str, object]:
        """The fields of a body; an image, a sound or a video is `inputs`."""
        if is_file_type(request.mimetype, self._task.name):
            return {"inputs": self._host.data()}
        return self._host.read()

    def answer(self, body: Mapping[str, object], accept: str | None) -> Response:
        """The answer to `inputs`."""
        asked, warnings = read_pipeline_request(body, self._task.name, accept)
        self._host.warn(warnings)
        answer = self._host.perform(msgspec.msgpack.encode(asked))
        return Response(answer.body, answer.code, content_type=answer.content_type)
