"""Inputs of many requests through one model, each with an answer or an error of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from core.errors import RequestError
from core.pipeline_tasks import QUESTION_ANSWERING
from core.task_bodies import PipelineBody
from engine.loading.model_source import ModelSource
from engine.tasks.loading import describe
from engine.tasks.performer import Answer, Description, Job, Outcome, run_apart
from engine.tasks.pipelines.answers import encoded
from engine.tasks.pipelines.model import PipelineModel, TaskModel
from engine.tasks.pipelines.question_answering import QuestionAnswering

_WRONG_INPUT = (TypeError, ValueError, KeyError)
"""What pipelines raise where they do not understand what they are given."""


class _Item(NamedTuple):
    """One input of a batch."""

    job: int
    place: int
    prepared: Any


class PipelinePerformer:
    """Runs inputs with equal parameters together, where the model can, whichever requests they
    belong to."""

    def __init__(self, task: str, source: ModelSource) -> None:
        self._model: TaskModel = (
            QuestionAnswering(source) if task == QUESTION_ANSWERING else PipelineModel(task, source)
        )
        self._decode = msgspec.msgpack.Decoder(PipelineBody).decode

    @property
    def description(self) -> Description:
        return describe(self._model.model)

    @torch.inference_mode()
    def perform(self, jobs: Sequence[Job], between_runs: Callable[[], None]) -> list[Outcome]:
        bodies = [self._decode(job.body) for job in jobs]
        results: list[list[Any]] = [list(map(self._prepared(body), body.inputs)) for body in bodies]
        alike: defaultdict[bytes, list[_Item]] = defaultdict(list)
        for job, body in enumerate(bodies):
            key = msgspec.msgpack.encode(body.parameters, order="sorted")
            for place, prepared in enumerate(results[job]):
                if not isinstance(prepared, Exception):
                    alike[key].append(_Item(job, place, prepared))
        groups = alike.values()
        if not self._model.together:
            groups = [[item] for items in groups for item in items]
        for items in groups:
            parameters = bodies[items[0].job].parameters

            def run(some: list[_Item], parameters: Any = parameters) -> list[Any]:
                return self._model.run([each.prepared for each in some], parameters)

            for item, result in zip(items, run_apart(run, items, between_runs), strict=True):
                results[item.job][item.place] = result
            between_runs()
        return list(map(self._outcome, bodies, results))

    def _prepared(self, body: PipelineBody) -> Callable[[object], Any]:
        def prepare(given: object) -> Any:
            try:
                return self._model.prepare(given, body.parameters)
            except Exception as error:  # of several libraries
                return error

        return prepare

    def _outcome(self, body: PipelineBody, results: list[Any]) -> Outcome:
        """In a list each input has a result or an error; where none has a result, that is it."""
        results = [_explained(each, body) for each in results]
        if all(isinstance(each, Exception) for each in results):
            return results[0]
        if body.is_batch:
            return _answer([_described(each) for each in results])
        if body.wants_sound:
            return Answer(results[0]["audio"], "audio/wav")
        return _answer(self._model.alone(results[0], body.inputs[0], body.parameters))


def _explained(result: Any, body: PipelineBody) -> Any:
    """An error that is about what the client sent, as a RequestError; else the result itself."""
    if isinstance(result, RequestError) or not isinstance(result, _WRONG_INPUT):
        return result
    about_parameters = isinstance(result, KeyError) or "keyword argument" in str(result)
    field = "parameters" if body.parameters and about_parameters else "inputs"
    return RequestError(field, f"not understood: {result}")


def _described(result: Any) -> Any:
    match result:
        case RequestError():
            return {"error": str(result), "code": 400, "field": result.field}
        case Exception():
            return {"error": f"{type(result).__name__}: {result}", "code": 424}
        case _:
            return result


def _answer(results: object) -> Outcome:
    try:
        return Answer(encoded(results))
    except TypeError as error:
        return error
