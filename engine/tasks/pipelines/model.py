"""transformers' pipelines, whatever their inputs and answers are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForInstanceSegmentation,
    AutoModelForTextToSpectrogram,
    AutoModelForUniversalSegmentation,
    pipeline,
)
from transformers import __version__ as transformers_version
from transformers.pipelines import PIPELINE_REGISTRY

from core.errors import ConfigurationError, RequestError
from core.pipeline_tasks import (
    CHAT_TASKS,
    PIPELINE_TASKS,
    QUESTION_ANSWERING,
    VIDEO_CLASSIFICATION,
)
from core.suggest import did_you_mean
from engine.loading.model_source import ModelSource
from engine.tasks.lengths import check_length, longest_text
from engine.tasks.loading import load_with_head
from engine.tasks.pipelines.answers import answers_of
from engine.tasks.pipelines.inputs import InputReader, Parameters
from engine.tasks.pipelines.parts import check_packages, load_parts
from engine.tasks.pipelines.video import FramesPipeline

logger = logging.getLogger(__name__)

_CUT_BY_REQUEST = ("text-classification", "fill-mask", "feature-extraction")
"""Pipelines that take a text as long as it is, unless they are asked to cut it."""
_CUTTING = {"truncation", "tokenizer_kwargs", "tokenize_kwargs"}
_CURE = ", unless parameters.truncation=true cuts it"
_WITHOUT_BF16 = ("depth-estimation", "table-question-answering")
"""Pipelines that have numpy read the model's output, which knows no bf16."""


class TaskModel(Protocol):
    """A model for one task. All may raise whatever transformers raises."""

    @property
    def model(self) -> Any:
        """transformers' own."""
        ...

    @property
    def together(self) -> bool:
        """Whether `run` is for more than one input."""
        ...

    def prepare(self, given: Any, parameters: Parameters) -> Any:
        """An input as `run` wants it. Raises RequestError where it is wrong."""
        ...

    def run(self, inputs: list[Any], parameters: Parameters) -> list[Any]:
        """A result for each prepared input, all with the same parameters."""
        ...

    def alone(self, result: Any, given: Any, parameters: Parameters) -> Any:
        """The result in the form in which it answers an input that was not in a list."""
        ...


class PipelineModel:
    """Raises ConfigurationError where the task or the model cannot be served."""

    def __init__(self, task: str, source: ModelSource) -> None:
        kind = _chosen(_model_classes(task, source), source)
        check_packages(task)
        self._task = task
        self.together = PIPELINE_TASKS[task].together
        if task in _WITHOUT_BF16 and source.dtype == torch.bfloat16:
            logger.warning("%s is computed in fp32: its pipeline cannot read bf16", task)
            source = replace(source, dtype=torch.float32)
        parts = load_parts(task, source)
        self.model = load_with_head(source, kind, task)
        if task == VIDEO_CLASSIFICATION:
            parts["pipeline_class"] = FramesPipeline
        try:
            make: Any = pipeline  # its types know every task by name
            self._pipeline = make(task, model=self.model, device=source.device, **parts)
            if PIPELINE_TASKS[task].writes_sound:
                self._pipeline.preprocess("a")  # which transformers 5.17 cannot, of tokenizers
        except Exception as error:  # of several libraries
            raise ConfigurationError(
                f"transformers {transformers_version} cannot make a {task} pipeline: {error}"
            ) from error
        self._make_paddable()
        self._reader = InputReader(task, PIPELINE_TASKS[task], self._pipeline)
        self._answer = answers_of(task)

    def prepare(self, given: Any, parameters: Parameters) -> Any:
        if self._task in _CUT_BY_REQUEST:
            texts = _texts(given)
            if not parameters.keys() & _CUTTING:
                check_length(texts, self._pipeline.tokenizer, self.model, "inputs", _CURE)
        return self._reader.read(given, parameters)

    def run(self, inputs: list[Any], parameters: Parameters) -> list[Any]:
        parameters = self._settled(deepcopy(parameters))  # some pipelines write into them
        if len(inputs) == 1 and self._task != "text-classification":
            results = [self._pipeline(inputs[0], **parameters)]  # some unpack a list of one
        else:
            results = self._pipeline(inputs, batch_size=len(inputs), **parameters)
        return list(map(self._answer, results))

    def alone(self, result: Any, given: Any, parameters: Parameters) -> Any:
        is_text_classification = self._task == "text-classification"
        is_listed = is_text_classification and isinstance(given, str) and "top_k" not in parameters
        return [result] if is_listed else result

    def _settled(self, parameters: Parameters) -> Parameters:
        """With what is not transformers' own default."""
        if self._task in CHAT_TASKS:
            return {"return_full_text": False, **parameters}  # as of texts
        if self._task == "document-question-answering":
            limit = longest_text(self._pipeline.tokenizer, self.model)
            return {**parameters, "max_seq_len": min(limit, parameters.get("max_seq_len", limit))}
        return parameters

    def _make_paddable(self) -> None:
        """A decoder without a token for padding gets its last one, so that it can be batched."""
        tokenizer = self._pipeline.tokenizer
        if tokenizer is None or not self.together:
            return
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if self.model.config.get_text_config().pad_token_id is None:
            self.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _model_classes(task: str, source: ModelSource) -> Sequence[Any]:
    """The Auto classes of a task. Raises ConfigurationError for one that is not served."""
    names = [*PIPELINE_REGISTRY.get_supported_tasks(), QUESTION_ANSWERING]
    if task not in names:
        raise ConfigurationError(
            f"option.task={task}: transformers has no such pipeline{did_you_mean(task, names)}"
        )
    if task not in PIPELINE_TASKS:
        raise ConfigurationError(
            f"option.task={task}: this version knows no form of request for that pipeline; serve "
            "it by a model.py of your own"
        )
    kinds = PIPELINE_REGISTRY.check_task(task)[1]["pt"]
    match task, source.config.model_type:  # what pipelines run beside
        case "image-segmentation", _:
            return (*kinds, AutoModelForUniversalSegmentation, AutoModelForInstanceSegmentation)
        case "document-question-answering", "vision-encoder-decoder":  # Donut
            return (AutoModelForImageTextToText,)
        case _:
            return kinds


def _chosen(kinds: Sequence[Any], source: ModelSource) -> Any:
    """The class that makes the model what its files say it is; else one that has such a model.

    Raises ConfigurationError for one that is not served.
    """
    mine = type(source.config)
    if mine in AutoModelForTextToSpectrogram._model_mapping:
        raise ConfigurationError(
            f"{source.config.model_type} makes spectrograms, which another model makes sounds of; "
            "serve both by a model.py of your own"
        )
    fitting = [kind for kind in kinds if mine in kind._model_mapping]
    (architecture, *_) = source.config.architectures or [""]
    named = [kind for kind in fitting if kind._model_mapping[mine].__name__ == architecture]
    return next(iter([*named, *fitting, *kinds]))


def _texts(given: Any) -> dict[str, str]:
    match given:
        case str():
            return {"text": given}
        case {"text": str(), **others} if others.keys() <= {"text_pair"}:
            return given
        case _:
            raise RequestError("inputs", 'expected a text, or {"text": "...", "text_pair": "..."}')
