"""Run the inputs of many requests through one pipeline, each with its own answer or error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch
from transformers.pipelines.base import PipelineException

from core.configuration import pipeline_tasks
from core.configuration.options import Options
from core.errors import RequestError
from core.foreign_code import contained, reason_of
from core.part import Part
from core.protocol.task_bodies import PipelineBody
from engine.loading.model_source import ModelSource
from engine.tasks.loading import describe
from engine.tasks.performer import Answer, Description, Job, Outcome, run_isolated
from engine.tasks.pipelines import text_classification
from engine.tasks.pipelines.answers import encode_json
from engine.tasks.pipelines.model import PipelineModel, num_characters
from engine.tasks.pipelines.question_answering import QuestionAnswering
from engine.tasks.turns import Prepared, Waiting, take_turns

_WRONG_INPUT = (TypeError, ValueError, KeyError, PipelineException)
"""Exceptions that pipelines raise for inputs or parameters they do not accept."""


@dataclass(slots=True, eq=False)
class _Progress:
    """How far a request is."""

    body: PipelineBody
    key: bytes
    """Equal for equal parameters."""
    results: list[Any]
    """The result or the error of each input, once it is known."""
    parts: tuple[Part, ...] = ()


_Input = tuple[_Progress, Prepared[Any]]


class PipelinePerformer:
    """Runs the inputs of all running requests by turns, those with equal parameters together."""

    def __init__(self, task: str, source: ModelSource, options: Options, step_tokens: int) -> None:
        """step_tokens: the token budget of a step."""
        self.model = _load(task, source, options, step_tokens)
        self._step_tokens = step_tokens
        self._running: WeakKeyDictionary[Job, tuple[_Progress, Waiting[Any]]] = WeakKeyDictionary()
        self._decode = msgspec.msgpack.Decoder(PipelineBody).decode

    @property
    def description(self) -> Description:
        model = self.model
        return describe(model.model, model.encoder, notes=model.notes, features=model.features)

    @torch.inference_mode()
    def perform(
        self, jobs: Sequence[Job], between_runs: Callable[[], None]
    ) -> list[Outcome | None]:
        """Run as many inputs of these requests as the token budget allows, by turns."""
        for job in jobs:
            if job not in self._running:
                self._running[job] = self._begin(self._decode(job.body), job.parts)
        running = [self._running[job] for job in jobs]
        by_parameters: defaultdict[bytes, list[_Input]] = defaultdict(list)
        for progress, item in take_turns(dict(running), self._step_tokens):
            by_parameters[progress.key].append((progress, item))
        between_runs()
        for inputs in by_parameters.values():
            for start in range(0, len(inputs), self.model.max_at_once):
                part = inputs[start : start + self.model.max_at_once]
                results = self._run(part, between_runs)
                for (progress, item), result in zip(part, results, strict=True):
                    progress.results[item.position] = result
                between_runs()
        return [
            self._outcome(progress) if waiting.has_ended else None for progress, waiting in running
        ]

    def _begin(self, body: PipelineBody, parts: tuple[Part, ...]) -> tuple[_Progress, Waiting[Any]]:
        key = msgspec.msgpack.encode(body.parameters, order="sorted")
        progress = _Progress(body, key, [None] * len(body.inputs), parts)
        return progress, Waiting(
            list(map(num_characters, body.inputs)), partial(self._sized, progress)
        )

    def _sized(self, progress: _Progress, positions: list[int]) -> list[Prepared[Any]]:
        """Count the tokens of these inputs of a request; keep the errors of wrong ones."""
        inputs = [progress.body.inputs[position] for position in positions]
        results = run_isolated(
            lambda part: self.model.sized(part, progress.body.parameters), inputs, lambda: None
        )
        sized: list[Prepared[Any]] = []
        for position, result in zip(positions, results, strict=True):
            if isinstance(result, Exception):
                progress.results[position] = result
            else:
                num_tokens, value = result
                sized.append(Prepared(num_tokens, position, value))
        return sized

    def _run(self, inputs: list[_Input], between_runs: Callable[[], None]) -> Iterator[Any]:
        """Yield the result or error of each input. All have the same parameters."""
        parameters = inputs[0][0].body.parameters
        prepared = [self._prepared(item.value, parameters, of.parts) for of, item in inputs]
        good = [value for value in prepared if not isinstance(value, Exception)]

        def run(part: list[Any]) -> list[Any]:
            return self.model.run(part, parameters, between_runs)

        results = iter(run_isolated(run, good, between_runs) if good else [])
        return (value if isinstance(value, Exception) else next(results) for value in prepared)

    def _prepared(
        self, value: object, parameters: Mapping[str, Any], parts: tuple[Part, ...]
    ) -> Any:
        try:
            with contained:
                return self.model.prepare(value, parameters, parts)
        except Exception as error:  # several libraries raise here
            return error

    def _outcome(self, progress: _Progress) -> Outcome:
        """Return the answer of a request, or its first error if none of its inputs has a result.

        For a list of inputs the answer has a result or an error for each of them.
        """
        body = progress.body
        results = [_blame_request(result, body) for result in progress.results]
        if all(isinstance(result, Exception) for result in results):
            return results[0]
        if body.is_batch:
            return _answer([_describe_error(result) for result in results])
        if body.wants_sound:
            return Answer(results[0]["audio"], "audio/wav")
        return _answer(self.model.unbatched(results[0], body.inputs[0], body.parameters))


def _load(task: str, source: ModelSource, options: Options, step_tokens: int) -> Any:
    match task:
        case pipeline_tasks.QUESTION_ANSWERING:
            return QuestionAnswering(source, step_tokens)
        case text_classification.TASK:
            return text_classification.TextClassification(source, options, step_tokens)
        case _:
            return PipelineModel(task, source, step_tokens)


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
