"""Handlers with the interface of SageMaker's framework containers: up to four functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from core.errors import RequestError
from engine.tasks.handlers.answer import call_handler, to_answer
from engine.tasks.handlers.djl_python import Output
from engine.tasks.performer import Answer, Description, Job, Outcome

_JSON = "application/json"
_TEXT = (_JSON, "text/")
"""Beginnings of the content types whose bodies are passed on as str."""


class SageMakerHandler:
    """Calls `model_fn(model_dir)` once, and three functions for each request.

    These are `input_fn(body, content_type)`, `predict_fn(data, model)` and
    `output_fn(prediction, accept)`. By default they read JSON, call the model with it and write
    JSON. `output_fn` may return `(body, content_type)`. It may also return text or bytes alone,
    with the content type that the request accepts, or any other value that `to_answer` converts.
    """

    def __init__(self, module: ModuleType, model_dir: Path) -> None:
        self._input_fn = getattr(module, "input_fn", _read_json)
        self._predict_fn = getattr(module, "predict_fn", _call_model)
        self._output_fn = getattr(module, "output_fn", _write_json)
        self._model = module.model_fn(str(model_dir))

    @property
    def description(self) -> Description:
        return Description(architecture=type(self._model).__name__)

    def perform(self, jobs: Sequence[Job], between_runs: Callable[[], None]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for job in jobs:
            outcomes.append(call_handler(lambda job=job: self._answer(job)))
            between_runs()
        return outcomes

    def _answer(self, job: Job) -> Answer:
        headers = {name.lower(): value for name, value in job.headers.items()}
        content_type = headers.get("content-type", "").partition(";")[0].strip() or _JSON
        accept = headers.get("accept", "*/*")
        accept = _JSON if accept == "*/*" else accept
        body = job.body.decode() if content_type.startswith(_TEXT) else job.body
        prediction = self._predict_fn(self._input_fn(body, content_type), self._model)
        match self._output_fn(prediction, accept):
            case (body, str(kind)):
                return Answer(to_answer(body).body, kind)
            case str() | bytes() | bytearray() as body:
                return Answer(to_answer(body).body, accept)
            case body:
                return to_answer(body)


def _read_json(body: str | bytes, content_type: str) -> Any:
    if content_type != _JSON:
        raise RequestError(
            "Content-Type", f"{content_type}: only {_JSON} is supported without an input_fn"
        )
    try:
        return json.loads(body)
    except ValueError as error:
        raise RequestError("body", f"is not valid JSON: {error}") from None


def _call_model(data: Any, model: Any) -> Any:
    return model(data)


def _write_json(prediction: Any, accept: str) -> Output:
    return Output().add_as_json(prediction)
