"""A handler in the form of SageMaker's framework containers: up to four functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from core.errors import RequestError
from djl_python import Output
from engine.tasks.handlers.answer import answer_of, attempt
from engine.tasks.performer import Answer, Description, Job, Outcome

_JSON = "application/json"
_TEXT = (_JSON, "text/")
"""Content types whose bodies are handed on as text."""


class SageMakerHandler:
    """`model_fn(model_dir)` is called once; for each request `input_fn(body, content_type)`,
    `predict_fn(data, model)` and `output_fn(prediction, accept)`.

    By default a body is JSON, the model is called with it, and the answer is JSON. An `output_fn`
    may return the body alone, which then is of the type that the request accepts, or with a type.
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
            outcomes.append(attempt(lambda job=job: self._answer(job)))
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
                return Answer(answer_of(body).body, kind)
            case str() | bytes() | bytearray() as body:
                return Answer(answer_of(body).body, accept)
            case body:
                return answer_of(body)


def _read_json(body: str | bytes, content_type: str) -> Any:
    if content_type != _JSON:
        raise RequestError(
            "Content-Type", f"{content_type}: without an input_fn only {_JSON} is read"
        )
    try:
        return json.loads(body)
    except ValueError as error:
        raise RequestError("body", f"is not JSON: {error}") from None


def _call_model(data: Any, model: Any) -> Any:
    return model(data)


def _write_json(prediction: Any, accept: str) -> Output:
    return Output().add_as_json(prediction)
