"""Run the inputs of many requests through one pipeline, each with its own answer or error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from core.errors import RequestError
from core.foreign_code import contained, reason_of
from core.pipeline_tasks import QUESTION_ANSWERING
from core.task_bodies import PipelineBody
from engine.loading.model_source import ModelSource
from engine.tasks.loading import describe
from engine.tasks.performer import Answer, Description, Job, Outcome, run_isolated
from engine.tasks.pipelines.answers import encode_json
from engine.tasks.pipelines.model import PipelineModel, TaskModel
from engine.tasks.pipelines.question_answering import QuestionAnswering

_WRONG_INPUT = (TypeError, ValueError, KeyError)
"""Exceptions that pipelines raise for inputs or parameters they do not accept."""


class _Item(NamedTuple):
    """One prepared input of a batch."""

    job: int
    """Index of the request in the batch."""
    position: int
    """Index of the input in the request."""
    prepared: Any


class PipelinePerformer:
    """Batches inputs with equal parameters across requests, if the model can batch."""

    def __init__(self, task: str, source: ModelSource) -> None:
        self.model: TaskModel = (
            QuestionAnswering(source) if task == QUESTION_ANSWERING else PipelineModel(task, source)
        )
        self._decode = msgspec.msgpack.Decoder(PipelineBody).decode

    @property
    def description(self) -> Description:
        return describe(self.model.model)

    @torch.inference_mode()
    def perform(self, jobs: Sequence[Job], between_runs: Callable[[], None]) -> list[Outcome]:
        bodies = [self._decode(job.body) for job in jobs]
        results: list[list[Any]] = [list(map(self._preparer(body), body.inputs)) for body in bodies]
        by_parameters: defaultdict[bytes, list[_Item]] = defaultdict(list)
        for job, body in enumerate(bodies):
            key = msgspec.msgpack.encode(body.parameters, order="sorted")
            for position, prepared in enumerate(results[job]):
                if not isinstance(prepared, Exception):
                    by_parameters[key].append(_Item(job, position, prepared))
        groups = by_parameters.values()
        if not self.model.can_batch:
            groups = [[item] for items in groups for item in items]
        for items in groups:
            parameters = bodies[items[0].job].parameters

            def run(part: list[_Item], parameters: Any = parameters) -> list[Any]:
                return self.model.run([item.prepared for item in part], parameters)

            for item, result in zip(items, run_isolated(run, items, between_runs), strict=True):
                results[item.job][item.position] = result
            between_runs()
        return list(map(self._outcome, bodies, results))

    def _preparer(self, body: PipelineBody) -> Callable[[object], Any]:
        def prepare(value: object) -> Any:
            try:
                with contained:
                    return self.model.prepare(value, body.parameters)
            except Exception as error:  # several libraries raise here
                return error

        return prepare

    def _outcome(self, body: PipelineBody, results: list[Any]) -> Outcome:
        """Return the answer of a request, or its first error if none of its inputs has a result.

        For a list of inputs the answer has a result or an error for each of them.
        """
        results = [_blame_request(result, body) for result in results]
        if all(isinstance(result, Exception) for result in results):
            return results[0]
        if body.is_batch:
            return _answer([_describe_error(result) for result in results])
        if body.wants_sound:
            return Answer(results[0]["audio"], "audio/wav")
        return _answer(self.model.unbatched(results[0], body.inputs[0], body.parameters))


def _blame_request(result: Any, body: PipelineBody) -> Any:
    """Turn an error about the client's input into a RequestError; return anything else as it is."""
    if isinstance(result, RequestError) or not isinstance(result, _WRONG_INPUT):
        return result
    about_parameters = isinstance(result, KeyError) or "keyword argument" in str(result)
    field = "parameters" if body.parameters and about_parameters else "inputs"
    return RequestError(field, f"not accepted: {result}")


def _describe_error(result: Any) -> Any:
    """Turn an error into the JSON object that takes its place in a list of results."""
    match result:
        case RequestError():
            return {"error": str(result), "code": 400, "field": result.field}
        case Exception():
            return {"error": reason_of(result), "code": 424}
        case _:
            return result


def _answer(results: object) -> Outcome:
    try:
        with contained:
            return Answer(encode_json(results))
    except Exception as error:  # Pillow and the result's own types may raise anything
        return error
