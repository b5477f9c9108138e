"""Build and call transformers' pipelines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

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

from core.configuration.pipeline_tasks import (
    CHAT_TASKS,
    PIPELINE_TASKS,
    QUESTION_ANSWERING,
    VIDEO_CLASSIFICATION,
)
from core.configuration.suggest import did_you_mean
from core.errors import ConfigurationError, RequestError
from core.foreign_code import contained
from core.part import Feature, Part
from core.protocol.task_bodies import TRANSCRIPTION
from engine.loading.model_source import ModelSource
from engine.tasks.lengths import check_length, longest_text, plan_windows
from engine.tasks.loading import load_with_head
from engine.tasks.pipelines.answers import postprocessor
from engine.tasks.pipelines.conversation import CONVERSATION_PIPELINES
from engine.tasks.pipelines.input_reader import InputReader, Parameters
from engine.tasks.pipelines.parts import check_packages, load_parts
from engine.tasks.pipelines.speech import transcribe
from engine.tasks.pipelines.video import FramesPipeline

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 32
"""Inputs that are prepared and read by the model together. A small image file may unpack to 200 MB.
"""
CHARACTERS = 4
"""Characters of an average token."""
_TRUNCATE_ON_REQUEST = ("fill-mask", "feature-extraction")
"""Pipelines that do not truncate a text unless a parameter says so."""
_READ_TEXTS = (
    *_TRUNCATE_ON_REQUEST,
    "text-classification",
    "token-classification",
    "zero-shot-classification",
)
_TOKENIZER_PARAMETERS = ("tokenizer_kwargs", "tokenize_kwargs")
"""Parameters that hold arguments of the tokenizer; their names depend on the pipeline."""
_PAGE_STRIDE = 256
"""transformers' own number of tokens by which the windows of a page overlap."""
HINT = "; set {}.truncation=true to truncate the text"
_WITHOUT_BF16 = ("depth-estimation", "table-question-answering")
"""Pipelines that convert the model's output to numpy, which has no bf16."""

Sized = tuple[int, Any] | Exception
"""How many tokens of a step an input takes, and what `prepare` gets for it; or its error."""


class PipelineModel:
    """A transformers pipeline for one task.

    The constructor raises ConfigurationError if the task or the model cannot be served. The other
    methods may raise whatever transformers raises.
    """

    notes: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()
    """As in `Description`."""

    def __init__(self, task: str, source: ModelSource, step_tokens: int) -> None:
        """step_tokens: the token budget of a step."""
        kind = choose_model_class(task, source)
        check_packages(task)
        self._task = task
        self._can_batch = PIPELINE_TASKS[task].can_batch
        self.max_at_once = MAX_AT_ONCE if self._can_batch else 1
        """Inputs that `run` takes at most."""
        self._least_tokens = max(1, step_tokens // self.max_at_once)
        if task in _WITHOUT_BF16 and source.dtype == torch.bfloat16:
            logger.warning("%s runs in fp32: its pipeline cannot convert bf16 to numpy", task)
            source = replace(source, dtype=torch.float32)
        parts = load_parts(task, source)
        self.model, self.encoder = load_with_head(source, kind, task)
        if task == VIDEO_CLASSIFICATION:
            parts["pipeline_class"] = FramesPipeline
        if task in CHAT_TASKS:
            parts["pipeline_class"] = CONVERSATION_PIPELINES[task]
        try:
            make: Any = pipeline  # untyped: its overloads take literal names only
            with contained:
                self.pipeline = make(task, model=self.model, device=source.device, **parts)
                if PIPELINE_TASKS[task].writes_sound:
                    self.pipeline.preprocess("a")  # fails for some tokenizers in transformers 5.17
        except Exception as error:  # several libraries raise here
            raise ConfigurationError(
                f"transformers {transformers_version} cannot build a {task} pipeline: {error}"
            ) from error
        self._ensure_pad_token()
        if task in _READ_TEXTS:  # their pipelines truncate to the tokenizer's limit alone
            limit = longest_text(self.pipeline.tokenizer, self.model)
            self.pipeline.tokenizer.model_max_length = limit
        self._reads_words = (
            task == "document-question-answering"
            and source.config.model_type != "vision-encoder-decoder"  # Donut
        )
        self._reader = InputReader(task, PIPELINE_TASKS[task], self.pipeline)
        self._postprocess = postprocessor(task)

    def sized(self, inputs: list[Any], parameters: Parameters) -> Sequence[Sized]:
        """Return `Sized` for each input. The tokens are an estimate, by characters."""
        labels = parameters.get("candidate_labels")
        num_texts = 1
        if isinstance(labels, str):
            num_texts = labels.count(",") + 1
        elif isinstance(labels, list) and labels:
            num_texts = len(labels)
        return [
            (max(self._least_tokens, num_texts * num_characters(given) // CHARACTERS), given)
            for given in inputs
        ]

    def prepare(self, given: Any, parameters: Parameters, parts: tuple[Part, ...]) -> Any:
        """Convert one input of a request with these parts for `run`.

        Raises RequestError if it is wrong.
        """
        if self._task in _TRUNCATE_ON_REQUEST:
            texts = check_text_fields(given)
            if is_truncated(parameters):
                self.check_max_length(parameters, is_pair="text_pair" in texts)
            else:
                in_kwargs = "truncation" not in PIPELINE_TASKS[self._task].parameters
                hint = HINT.format("parameters.tokenizer_kwargs" if in_kwargs else "parameters")
                check_length(texts, self.pipeline.tokenizer, self.model, "inputs", hint)
        if self._task == "token-classification" and "stride" in parameters:
            self._check_stride(parameters["stride"])
        return self._reader.read(given, parameters)

    def run(
        self, inputs: list[Any], parameters: Parameters, between_runs: Callable[[], None]
    ) -> list[Any]:
        """Return one result per prepared input; all share the parameters.

        If it runs the model more than once, it calls `between_runs` between the runs.
        """
        if TRANSCRIPTION in parameters:
            wanted = parameters[TRANSCRIPTION]
            return [transcribe(self.pipeline, samples, wanted) for samples in inputs]
        parameters = self._completed(parameters, inputs)
        if len(inputs) == 1:
            results = [self.pipeline(inputs[0], **parameters)]  # some would unpack a list of one
        else:
            results = self.pipeline(inputs, batch_size=len(inputs), **parameters)
        return list(map(self._postprocess, results))

    def unbatched(self, result: Any, given: Any, parameters: Parameters) -> Any:
        """Convert a result into the answer for an input that was not sent in a list."""
        return result

    def _completed(self, given: Parameters, inputs: list[Any]) -> dict[str, Any]:
        """Return a copy with the defaults that differ from transformers', within the model's limit.

        Some pipelines modify their parameters.
        """
        parameters = deepcopy(dict(given))
        if self._task in CHAT_TASKS:
            return {"return_full_text": False, **parameters}  # as in /invocations with `inputs`
        if self._reads_words:
            return parameters | self._windows(inputs[0]["question"], parameters)
        if self._task == "fill-mask" and "top_k" in parameters:
            parameters["top_k"] = min(parameters["top_k"], self.model.config.vocab_size)
        for _, arguments in _tokenizer_arguments(parameters):
            if "max_length" in arguments:
                limit = longest_text(self.pipeline.tokenizer, self.model)
                arguments["max_length"] = min(arguments["max_length"], limit)
        return parameters

    def _windows(self, question: str, parameters: Parameters) -> dict[str, int]:
        """Return the parameters for the windows in which a page is read."""
        limit = longest_text(self.pipeline.tokenizer, self.model)
        length = min(limit, parameters.get("max_seq_len", limit))
        stride = parameters.get("doc_stride", _PAGE_STRIDE)
        windows = plan_windows(self.pipeline.tokenizer, question, length, stride)
        return {"max_seq_len": windows.length, "doc_stride": windows.stride}

    def check_max_length(self, parameters: Parameters, *, is_pair: bool) -> None:
        """Raise RequestError if a truncated text has no token: it is not truncated at all then."""
        lowest = self.pipeline.tokenizer.num_special_tokens_to_add(pair=is_pair) + 1
        for field, arguments in _tokenizer_arguments(parameters):
            if arguments.get("max_length", lowest) < lowest:
                raise RequestError(f"{field}.max_length", f"must be at least {lowest}")

    def _check_stride(self, stride: int) -> None:
        """Raise RequestError if the windows of a long text overlap by more than half of them."""
        tokenizer = self.pipeline.tokenizer
        room = longest_text(tokenizer, self.model) - tokenizer.num_special_tokens_to_add()
        if stride > room // 2:
            raise RequestError("parameters.stride", f"must be at most {room // 2} for this model")

    def _ensure_pad_token(self) -> None:
        """Use the eos token for padding if a tokenizer has no pad token: batches need padding."""
        tokenizer = self.pipeline.tokenizer
        if tokenizer is None or not self._can_batch:
            return
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if self.model.config.get_text_config().pad_token_id is None:
            self.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def num_characters(value: Any) -> int:
    """Return the length of all texts in an input."""
    match value:
        case str():
            return len(value)
        case dict():
            return sum(map(num_characters, value.values()))
        case list():
            return sum(map(num_characters, value))
        case _:
            return 0


def _model_classes(task: str, source: ModelSource) -> Sequence[Any]:
    """Return the Auto classes of a task. Raises ConfigurationError if it is not supported."""
    names = [*PIPELINE_REGISTRY.get_supported_tasks(), QUESTION_ANSWERING]
    if task not in names:
        raise ConfigurationError(
            f"option.task={task}: transformers has no such pipeline{did_you_mean(task, names)}"
        )
    if task not in PIPELINE_TASKS:
        raise ConfigurationError(
            f"option.task={task}: this version does not support that pipeline; serve it with a "
            "model.py of your own"
        )
    kinds = PIPELINE_REGISTRY.check_task(task)[1]["pt"]
    match task, source.config.model_type:  # pipelines accept more than the registry lists
        case "image-segmentation", _:
            return (*kinds, AutoModelForUniversalSegmentation, AutoModelForInstanceSegmentation)
        case "document-question-answering", "vision-encoder-decoder":  # Donut
            return (AutoModelForImageTextToText,)
        case _:
            return kinds


def choose_model_class(task: str, source: ModelSource) -> Any:
    """Return the Auto class of a task that loads the checkpoint's architecture.

    Falls back to the first class that supports the config, then to the first class. Raises
    ConfigurationError if the task is not supported, and for models that make spectrograms.
    """
    kinds = _model_classes(task, source)
    config_class = type(source.config)
    if config_class in AutoModelForTextToSpectrogram._model_mapping:
        raise ConfigurationError(
            f"{source.config.model_type} makes spectrograms and needs a second model, a vocoder; "
            "serve both with a model.py of your own"
        )
    fitting = [kind for kind in kinds if config_class in kind._model_mapping]
    (architecture, *_) = source.config.architectures or [""]
    exact = [kind for kind in fitting if kind._model_mapping[config_class].__name__ == architecture]
    return next(iter([*exact, *fitting, *kinds]))


def is_truncated(parameters: Parameters) -> bool:
    """Return whether a request asks to cut texts that are too long."""
    choices = (arguments.get("truncation") for _, arguments in _tokenizer_arguments(parameters))
    return any(choice in (True, "longest_first") for choice in choices)


def _tokenizer_arguments(parameters: Parameters) -> list[tuple[str, Any]]:
    """Return the objects that hold arguments of the tokenizer, with their fields' names."""
    nested = [
        (f"parameters.{name}", parameters[name])
        for name in _TOKENIZER_PARAMETERS
        if name in parameters
    ]
    return [("parameters", parameters), *nested]


def check_text_fields(given: Any) -> dict[str, str]:
    """Return a text, or a pair, as arguments of the tokenizer. Raises RequestError for others."""
    match given:
        case str():
            return {"text": given}
        case {"text": str(), **others} if others.keys() <= {"text_pair"}:
            return given
        case _:
            raise RequestError("inputs", 'expected a text, or {"text": "...", "text_pair": "..."}')
