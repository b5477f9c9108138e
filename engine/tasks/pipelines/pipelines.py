"""Run the inputs of many requests through one pipeline, each with its own answer or error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch
from transformers.pipelines.base import PipelineException

from core.configuration.pipeline_tasks import QUESTION_ANSWERING
from core.errors import RequestError
from core.foreign_code import contained, reason_of
from core.protocol.task_bodies import PipelineBody
from engine.loading.model_source import ModelSource
from engine.tasks.loading import describe
from engine.tasks.performer import Answer, Description, Job, Outcome, run_isolated
from engine.tasks.pipelines.answers import encode_json
from engine.tasks.pipelines.model import PipelineModel
from engine.tasks.pipelines.question_answering import QuestionAnswering

MAX_AT_ONCE = 32
"""Inputs that are prepared and read by the model together. A small image file may unpack to 200 MB.
"""
_WRONG_INPUT = (TypeError, ValueError, KeyError, PipelineException)
"""Exceptions that pipelines raise for inputs or parameters they do not accept."""


class _Item(NamedTuple):
    job: int
    """Index of the request in the batch."""
    position: int
    """Index of the input in the request."""


class PipelinePerformer:
    """Batches inputs with equal parameters across requests, if the model can batch."""

    def __init__(self, task: str, source: ModelSource) -> None:
        self.model = (
            QuestionAnswering(source) if task == QUESTION_ANSWERING else PipelineModel(task, source)
        )
        self._decode = msgspec.msgpack.Decoder(PipelineBody).decode

    @property
    def description(self) -> Description:
        return describe(self.model.model, self.model.encoder)

    @torch.inference_mode()
    def perform(self, jobs: Sequence[Job], between_runs: Callable[[], None]) -> list[Outcome]:
        bodies = [self._decode(job.body) for job in jobs]
        by_parameters: defaultdict[bytes, list[_Item]] = defaultdict(list)
        for job, body in enumerate(bodies):
            key = msgspec.msgpack.encode(body.parameters, order="sorted")
            by_parameters[key] += [_Item(job, position) for position in range(len(body.inputs))]
        results: list[list[Any]] = [[None] * len(body.inputs) for body in bodies]
        size = MAX_AT_ONCE if self.model.can_batch else 1
        for items in by_parameters.values():
            for start in range(0, len(items), size):
                part = items[start : start + size]
                for item, result in zip(part, self._run(part, bodies, between_runs), strict=True):
                    results[item.job][item.position] = result
                between_runs()
        return list(map(self._outcome, bodies, results))

    def _run(
        self, items: list[_Item], bodies: list[PipelineBody], between_runs: Callable[[], None]
    ) -> Iterator[Any]:
        """Yield the result or error of each input. All have the same parameters."""
        parameters = bodies[items[0].job].parameters
        inputs = [bodies[item.job].inputs[item.position] for item in items]
        prepared = [self._prepared(value, parameters) for value in inputs]
        good = [value for value in prepared if not isinstance(value, Exception)]

        def run(part: list[Any]) -> list[Any]:
            return self.model.run(part, parameters, between_runs)

        results = iter(run_isolated(run, good, between_runs) if good else [])
        return (value if isinstance(value, Exception) else next(results) for value in prepared)

    def _prepared(self, value: object, parameters: Mapping[str, Any]) -> Any:
        try:
            with contained:
                return self.model.prepare(value, parameters)
        except Exception as error:  # several libraries raise here
            return error

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
    nested = [value for value in body.parameters.values() if isinstance(value, Mapping)]
    names = ["keyword argument", *body.parameters, *chain.from_iterable(nested)]
    about_parameters = isinstance(result, KeyError) or any(name in str(result) for name in names)
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
